"""Every command and Python block of the README and of docs/, page by page.

Each page gets a folder like a new user's; a block with a title is a file of that name. The fast
test accepts each command as the program itself does: commands of data_prep run on tiny files,
sweeps run with `launch.dry_run=true`, trainings are composed and checked with their data. The slow
tests train.

What does not run: `make` and `apt-get` install (tests/test_wheel.py does), the cluster's commands
need root (tests/slurm runs them), `mlflow ui` is a server, and Optuna's search needs the results of
its trials (tests/launch/test_sweepers.py has them).
"""

import ast
import contextlib
import functools
import html
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import data_prep.cli as data_prep_cli
from data_prep.cli import main as data_prep
from hpctrain.base.version import __version__
from hpctrain.cli import main as hpctrain
from hpctrain.config.composing import compose as by_hydra
from hpctrain.config.metric_registry import registered
from hpctrain.config.schema import Config, all_keys
from hpctrain.config.schema.key import members
from hpctrain.insight.doctor.command import settings
from hpctrain.runs.freeze import check, freeze
from hpctrain.tracking.journal import Journal, journal_path
from tests import forkserver
from tests.conftest import ROOT, process_kept, runs
from tests.gpu.first_minutes import PARTS
from tests.quick_compose import QuickCompose

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The words that begin a command; every other line of a block of commands is an error.
PROGRAMS = ("make", "python", "torchrun", "sbatch", "slurm/", "eval", "mlflow", "apt-get")
SHELL = ("git clone ", "cd ", "source ", "export ", "mkdir ", "chgrp ", "chmod ", "grep ", "rm ")
SHELL += ("until ", "wait")
OF_TRAINED = ("export", "evaluate", "predict")
# Reading the code that a job would have takes as long as all the rest of a dry run.
DRY = ("launch.dry_run=true", "launch.snapshot=off")
FILES = (".py", ".md", ".sbatch", ".yaml", ".json")
# Groups of configs that have no other choices than ours.
GROUPS = ("parallel", "precision", "scheduler", "optimizer", "tracking", "hardware", "debug")
_CLUSTER = re.compile(r"launch\.nodes|site[.=]|sweeper=optuna")  # need a cluster
# What pages name without showing it.
MY_NET = """\
from torch import nn

def evaluate(run):
    return run

class MyNet(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
"""
# The header and the values of a safetensors file: one weight of two numbers.
WEIGHTS = '{"1.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
WEIGHTS = f"{chr(len(WEIGHTS))}{chr(0) * 7}{WEIGHTS}{chr(0) * 8}"
SAMPLES = """\
import numpy as np

def samples():
    for number in range(20):
        yield {"signal": np.arange(4.0) + number}
"""


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks(page: Path | str) -> list[Block]:
    """Return the blocks of a page, or of its text."""
    whole = page if isinstance(page, str) else page.read_text()
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", whole, re.M | re.S)
    heads = [re.fullmatch(r'(\w*)(?: title="(.+)")?', head) for head, _ in found]
    assert all(heads), f'{page}: a block begins as ```python title="FILE"'
    return [
        Block(head[1], head[2] or "", text)
        for head, (_, text) in zip(heads, found, strict=True)
        if head
    ]


def commands(page: Path) -> list[str]:
    """Return the commands of a page in order, on one line each and without comments."""
    text = "".join(block.text for block in blocks(page) if block.language == "bash")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    strange = [line for line in lines if not line.startswith((*PROGRAMS, *SHELL))]
    assert not strange, f"{page}: {strange}: no command"
    lines = [line for line in lines if line.startswith(PROGRAMS)]
    return [re.sub(r"\s+#\s.*|\s+&?$", "", line) for line in lines]


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A folder with the files that a page names, which is the current one."""
    monkeypatch.chdir(tmp_path)
    # Slurm's commands have a test of their own: here -m runs on this machine.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(shutil.which("git") or "no git")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    _write_sources(tmp_path, np.random.default_rng(0))
    files = {
        "my_configs/site/mine.yaml": (ROOT / "conf/site/example.yaml").read_text(),
        "my_package.py": MY_NET,
        "mine.py": SAMPLES,
        "pretrained/model.safetensors": WEIGHTS,
        "ds.json": '{"train_batch_size": 64, "zero_optimization": {"stage": 2}}',
        "default_config.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
    }
    page: Path | None = getattr(request, "param", None)
    files |= {block.title: block.text for block in blocks(page) if block.title} if page else {}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    root, umask = logging.getLogger(), os.umask(0o077)
    handlers, level = [*root.handlers], root.level
    yield tmp_path
    root.handlers[:] = handlers
    root.setLevel(level)
    os.umask(umask)


def _write_sources(folder: Path, random: np.random.Generator) -> None:
    import h5py
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 255, (9, 7, 3), "uint8")
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    (folder / "corpus").mkdir()
    for number in range(5):
        (folder / "corpus" / f"{number}.txt").write_text(f"the text of file {number}\n" * 9)
    np.save(folder / "x.npy", random.normal(size=(400, 8)).astype("float32"))
    np.save(folder / "y.npy", random.integers(0, 3, 400))
    table = {"kind": ["a", "b"] * 10, "value": [*range(20)], "part": ["train"] * 15 + ["val"] * 5}
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "rows.parquet")
    (folder / "runs").mkdir()
    with h5py.File(folder / "runs" / "a.h5", "w") as file:
        file["x/data"] = random.normal(size=(10, 3))
        file["y"] = random.integers(0, 3, 10)
    with h5py.File(folder / "rec.h5", "w") as file:
        for number in range(12):
            file[f"rec_{number}/eeg"] = random.normal(size=(4, 16))
            attributes = {"label": number % 3, "split": ("train", "val")[number % 2]}
            file[f"rec_{number}"].attrs.update(attributes)


def call(main: Callable[[], Any], *argv: str, code: int = 0) -> str:
    """Call the `main` of a program in this process; return its output. It must end with `code`."""
    raw = io.BytesIO()
    said = io.TextIOWrapper(raw, write_through=True)  # `logs` writes bytes
    ended: Any = 0
    with (
        process_kept(),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        patch.setattr(sys, "argv", ["program", *argv])
        patch.setattr(by_hydra, "compose", _quick().compose)
        patch.setattr(subprocess, "run", forkserver.run)  # as `-m` looks at the classes of a user
        try:
            ended = main()
        except SystemExit as end:
            ended = end.code
    assert (ended or 0) == code, f"{shlex.join(argv)}: {ended}\n{raw.getvalue().decode()}"
    return raw.getvalue().decode()


def checked(words: list[str], ranks: int | None) -> Config:
    """Compose and check the config of a training, with its data."""
    words = [re.sub(r"(init_from)=runs/.*", r"\1=pretrained", word) for word in words]
    config = _quick().compose(words)
    assert config is not None
    check(config, ranks)
    return config


@functools.cache
def _quick() -> QuickCompose:
    return QuickCompose()


def accept(words: list[str], run: Path) -> None:
    """Let a program accept a command.

    Args:
        words: The command.
        run: A run directory, for the commands that name a run.
    """
    match words:
        case ["make", *words]:
            text = (ROOT / "Makefile").read_text()
            variables = [word.partition("=")[0] for word in words if "=" in word]
            (target,) = (word for word in words if "=" not in word)
            assert re.search(rf"^{target}:", text, re.M)
            assert all(re.search(rf"^{name} +\?=", text, re.M) for name in variables)
        case ["apt-get", "install", "--no-install-recommends", *packages]:
            needed = _dev_cluster("requirements").PACKAGES
            assert {*packages} == {*needed} - {"util-linux"}  # util-linux is everywhere
        case ["python", "-m", "hpctrain", "cluster", *rest] if rest != ["check"]:
            _dev_cluster("cli").parse(rest)
        case ["eval", "$(python -m hpctrain cluster env)"]:
            _dev_cluster("cli").parse(["env"])
        case ["mlflow", "ui", "--backend-store-uri", uri]:
            assert (
                uri.replace("$PWD", os.getcwd()) == checked(["experiment=digits"], 1).tracking.uri
            )
        case ["sbatch", "--array=1-8", "slurm/preprocess.sbatch", command, *_]:
            assert (ROOT / "slurm" / "preprocess.sbatch").is_file()
            assert command in data_prep_cli.COMMANDS
        case ["sbatch", "slurm/mlflow-server.sbatch", _]:
            assert (ROOT / "slurm" / "mlflow-server.sbatch").is_file()
        case ["sbatch", "--job-name=digits-a", "--dependency=singleton", *rest]:
            accept(["sbatch", *rest], run)
        case ["sbatch", script, *rest]:
            assert (ROOT / script).is_file()
            checked([w.replace("$(cat mlflow/server.uri)", "http://node1:5000") for w in rest], 1)
        case ["torchrun", "--nproc-per-node", _, "-m", "hpctrain", command, *rest] if (
            command in OF_TRAINED
        ):
            accept(["python", "-m", "hpctrain", command, *rest], run)
        case ["torchrun", "--nproc-per-node", ranks, "-m", "hpctrain", "bench", *rest]:
            checked([word for word in rest if "=" in word], int(ranks))
        case ["torchrun", "--nproc-per-node", ranks, "-m", "hpctrain", *rest]:
            checked(rest, int(ranks))
        case ["torchrun", "--nproc-per-node", _, script]:
            assert Path(script).is_file()  # the slow test starts the ranks
        case ["python", script] if 'Path("runs").glob' in Path(script).read_text():
            pass  # it uses what was trained (tests/test_first_hours.py)
        case ["python", script] if script.endswith(".py"):
            # The slow test uploads what it tracks, too.
            where = '"data.path=data/digits"'
            text = Path(script).read_text().replace(where, f'{where}, "tracking.upload=false"')
            Path("alone.py").write_text(text)
            program = [sys.executable, "-m", "alone"]
            done = forkserver.run(program, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        case ["python", "-m", "hpctrain", "new", project]:
            call(hpctrain, "new", project)
            enter(Path(project))  # the fixture goes back
        case ["python", "-m", "tests.gpu.first_minutes", "--only", *parts]:
            assert {*parts} <= {part.name for part in PARTS}
        case ["python", "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", prefix, _]:
            assert find_spec("torch.distributed.flight_recorder.fr_trace") is not None
            assert prefix in (ROOT / "hpctrain/cluster/ranks/flight_recorder.py").read_text()
        case ["python", "-m", "data_prep", "sample", *_]:
            pass  # the slow test runs what takes minutes
        case ["python", "-m", "hpctrain", "predict", *rest] if "--prompt" in rest:
            pass
        case ["python", "-m", "data_prep", *rest]:
            with pytest.MonkeyPatch.context() as patch:
                # One worker process: starting several takes seconds.
                patch.setattr(os, "sched_getaffinity", lambda _: {0})
                call(lambda: data_prep(rest))
        case ["python", "-m", "hpctrain", "status", "--watch"]:
            pass  # --watch would wait for a run
        case ["python", "-m", "hpctrain", "status", "--upload", *rest]:
            call(
                hpctrain, "status", "--upload", *rest, code=7
            )  # accepted, but no run here was tracked
        case ["python", "-m", "hpctrain", "report", "--over", *rest]:
            call(hpctrain, "report", "--over", *rest, code=6)  # of runs that were not trained
        case ["python", "-m", "hpctrain", "report", "--compare", *rest]:
            # It is accepted, but both are one run.
            call(hpctrain, "report", "--compare", *named(rest, run), code=2)
        case ["python", "-m", "hpctrain", *rest] if "hydra/sweeper=optuna" in rest:
            call(hpctrain, *rest, *DRY)
        case ["python", "-m", "hpctrain", *rest] if "-m" in rest:
            own = "site=mine" in rest and "--config-dir" not in rest
            call(hpctrain, *["--config-dir", "my_configs"] * own, *rest, *DRY)
        case ["python", "-m", "hpctrain", command, *rest] if command in OF_TRAINED:
            call(hpctrain, command, *named(rest, run), code=6)  # accepted, but nothing was trained
        case ["python", "-m", "hpctrain", "resume", "--branch", *rest]:
            call(hpctrain, "resume", "--branch", *named(rest, run), code=6)
        case ["python", "-m", "hpctrain", "resume", *rest]:
            call(hpctrain, "resume", *named(rest, run), *DRY)
        case ["python", "-m", "hpctrain", "plan", *rest]:
            # With fewer layers it takes a tenth of the time.
            call(hpctrain, "plan", *rest, *["model.layers=2"] * ("model=llama3_8b" in rest))
        case ["python", "-m", "hpctrain", "bench", *rest]:
            checked([word for word in rest if "=" in word], 1)  # tests/bench measures
        case ["python", "-m", "hpctrain", "report", "--plot", *rest]:
            if not journal_path(run).exists():
                journal = Journal(run)
                journal.append("metrics", step=1, metrics={"train/loss": 1.0})
                journal.close()
            call(hpctrain, "report", "--plot", *named(rest, run))
        case ["python", "-m", "hpctrain", "doctor", "--nodes", _, *rest]:
            settings(rest, "my_configs")  # the job itself runs on the development cluster
        case ["python", "-m", "hpctrain", "doctor", *rest]:
            call(hpctrain, "doctor", *rest)
        case ["python", "-m", "hpctrain", *rest] if any("=" in word for word in rest):
            if "experiment=stdlib_lm" not in rest:  # the data takes a minute
                checked(rest, 1)
        case ["python", "-m", "hpctrain", *rest]:
            call(hpctrain, *named(rest, run))
        case _:
            raise AssertionError("this test does not know the command")


def enter(project: Path) -> None:
    """Go into a project that a page has begun, with the files that the page shows."""
    for file in Path().glob("*.py"):
        shutil.copy(file, project)
    os.chdir(project)
    sys.path.insert(0, os.getcwd())


def named(words: list[str], run: Path) -> list[str]:
    """Return the words with the name of a real run in place of the page's."""
    pages = {"digits", "long", "finetune"}
    return [run.name if w.startswith("digits-3fa") or w in pages else w for w in words]


def _dev_cluster(part: str) -> Any:
    """Return a module of the development cluster, which is no installed package."""
    sys.path.insert(0, str(ROOT / "slurm"))
    try:
        return import_module(f"dev_cluster.{part}")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    ("page", "folder"),
    [
        # tests/plan gives `plan` the same words on small models, which is ten times as fast.
        pytest.param(page, page, id=page.stem, marks=[pytest.mark.slow] * (page.stem == "plan"))
        for page in PAGES
        if commands(page)
    ],
    indirect=["folder"],
)
def test_every_command_of_a_page_is_accepted(page: Path, folder: Path) -> None:
    config = checked(["experiment=digits"], 1)
    directory = check(config)
    freeze(config, directory)
    directory.logs.mkdir(exist_ok=True)
    (directory.logs / "1_0.rank0.log").write_text("a line\n")
    failed = []
    for words in map(shlex.split, commands(page)):
        expanded = [name for word in words for name in _glob(word)]
        try:
            accept(expanded, directory.path)
        except Exception as error:
            failed.append(f"{shlex.join(words)}\n    {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    for block in blocks(page):
        if block.language == "python" and f"python {block.title}" not in commands(page):
            code = compile(block.text, f"{page.name}: {block.title}", "exec")
            if calls := re.findall(r"hpctrain\.(\w+)\(", block.text):
                # tests/launch/test_api.py makes such calls; here the names must be right.
                # Those of submitit are in test_executors.py there.
                assert all(callable(getattr(import_module("hpctrain"), name)) for name in calls)
            elif "submitit." not in block.text:
                exec(code, {"__name__": "example"})


def test_a_page_shows_every_function_of_the_python_interface() -> None:
    text = (ROOT / "docs" / "submit.md").read_text()
    names = set(re.findall(r"hpctrain\.(\w+)\(", text))
    assert names == {"submit", "train", "load_run", "submit_function"}


def test_keys_and_choices_in_the_text_exist() -> None:
    """What is within a sentence or a table is not run, so at least its names must be right."""
    known = {member.name: member for member in members(Config)}
    free = tuple(f"{m.name}." for m in known.values() if m.type.startswith("dict"))
    top = "|".join(name for name in known if "." not in name)
    groups = {group: {file.stem for file in (ROOT / "conf" / group).iterdir()} for group in GROUPS}
    named, wrong = 0, []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", text):
            for name in re.findall(rf"(?<![\w./-])((?:{top})\.[a-z_][\w.]*)(?=[=\s,)}}]|$)", code):
                named += 1
                if not (name in known or name.startswith(free) or name.endswith(FILES)):
                    wrong.append((page.name, code, name))
            for group, choice in re.findall(rf"(?<![\w.])({'|'.join(GROUPS)})=([a-z]\w*)", code):
                named += 1
                if choice not in groups[group]:
                    wrong.append((page.name, code, f"{group}={choice}"))
    assert named > 300
    assert wrong == []


@pytest.mark.parametrize("kind", ["plain", "lightning", "ddp", "trainer"])
def test_checkpoints_of_other_programs_are_converted(kind: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    page = ROOT / "docs" / "migrate.md"
    (block,) = [block for block in blocks(page) if block.title == "convert.py"]
    exec(block.text, program := {"__name__": "convert"})
    table = torch.arange(6.0).view(2, 3)
    weights = {"embed.weight": table, "head.weight": table, "half": table.T.bfloat16()}
    stored: dict[str, Any] = {
        "plain": weights,
        "lightning": {"state_dict": {f"model.{k}": v for k, v in weights.items()}, "epoch": 3},
        "ddp": {"model": {f"module.{k}": v for k, v in weights.items()}, "optimizer": {"lr": 0.1}},
        "trainer": {"model_state_dict": {**weights, "version": 2}},
    }[kind]
    torch.save(stored, tmp_path / "old.pt")
    program["convert"](tmp_path / "old.pt", tmp_path / "new.safetensors")
    found = load_file(tmp_path / "new.safetensors")
    prefix = {"lightning": "model.", "ddp": "module."}.get(kind, "")
    assert found.keys() == {prefix + name for name in weights}
    assert all(torch.equal(found[prefix + name], value) for name, value in weights.items())


def test_everything_that_names_the_version_agrees() -> None:
    changes, cited = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", changes, re.M)
    assert heads[0] == ("Unreleased", "")
    assert heads[1] == (__version__, *re.findall(r"^date-released: (.*)$", cited, re.M))
    assert re.findall(r"^version: (.*)$", cited, re.M) == [__version__]
    assert call(hpctrain, "--version").split()[-1] == __version__


def test_the_badges_are_true() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    known = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    badges = re.findall(r"^\[!\[(.*?)\]", (ROOT / "README.md").read_text(), re.M)
    assert badges == [f"Python {known[0]} to {known[-1]}", "MIT licence", "mypy strict"]
    assert 'license = "MIT"' in project
    assert "\n[tool.mypy]\nstrict = true\n" in project


# What people of this field type into the search of a site.
WORDS = """
activation checkpointing; all-reduce; apptainer; augmentation; bandwidth; batch size; callback;
checkpoint; confidence interval; context parallel; cosine; cross-validation; cuda; data parallel;
deepspeed; deterministic; diffusion; distributedsampler; docker; early stopping; elastic; energy;
expert parallel; exponential moving average; fault tolerance; fine-tuning; flight recorder; fsdp2;
gan; goodput; gpu utilization; gradient accumulation; gradient clipping; hugging face;
hyperparameter; infiniband; inference; learning rate; lightning; lora; loss scale; mfu;
mixed precision; mlflow; monitoring; nan; nccl; nvlink; optuna; out of memory; pin_memory;
pipeline parallel; preemption; pretrained; profiler; qlora; reinforcement learning;
reproducibility; requeue; rocm; safetensors; sbatch; set_epoch; singularity;
strong and weak scaling; submitit; successive halving; tensor parallel; tensorboard; throughput;
time limit; tokenizer; torchrun; warm-up; webdataset; weights & biases; zarr
""".replace("\n", " ")


def build_site(folder: Path) -> None:
    """Build the documentation."""
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"]
    done = subprocess.run(
        [*build, str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build_site(tmp_path)
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    texts = [
        html.unescape(f"{page['title']} {page['text']}").lower()
        for page in index["docs"]
        if not page["location"].startswith("reference/")
    ]
    words = [word.strip() for word in WORDS.split(";")]
    assert [word for word in words if not any(word in text for text in texts)] == []
    keys = (tmp_path / "reference" / "keys" / "index.html").read_text()
    assert all(f"<dt><code>{key.name}</code></dt>" in keys for key in all_keys())
    heads = re.findall(r'<h2 id="[^"]*">(.*?)<a', keys)
    assert len(heads) == len({*heads}) > 20  # a section stands once
    metrics = (tmp_path / "reference" / "metrics" / "index.html").read_text()
    assert all(f"<code>{metric.name}</code>" in metrics for metric in registered())
    commands = (tmp_path / "reference" / "commands" / "index.html").read_text()
    assert all(f"usage: python -m data_prep {name}" in commands for name in data_prep_cli.COMMANDS)


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    said = re.findall(r"^### `([^`]+)`$", page, re.M)
    assert len(said) > 15
    files = [path for room in ("hpctrain", "data_prep") for path in (ROOT / room).rglob("*.py")]
    texts = [text for path in files for text in _texts(ast.parse(path.read_text()))]
    unknown = []
    for message in said:
        parts = [re.escape(part) for part in re.split("…", message) if part.strip(" .:")]
        if not any(re.search(".*".join(parts), text, re.S) for text in texts):
            unknown.append(message)
    assert not unknown


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module, with … in place of what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))


def _glob(word: str) -> list[str]:
    if "*" not in word or "(" in word or "=" in word:  # what a program expands itself
        return [word]
    return [str(path) for path in Path().glob(word)]


TRAINED = {
    "README.md": {"digits", "mine"},
    "docs/migrate.md": {"debug", "digits"},
    "docs/models.md": {"digits", "mine", "stdlib_lm"},
    "docs/extend.md": {"robust"},
    "docs/tasks.md": {"classes", "numbers"},
    "docs/own-task.md": {"heat"},
    "docs/train.md": {"digits", "tuned"},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "folder"), [(name, ROOT / name) for name in TRAINED], indirect=["folder"]
)
def test_the_trainings_of_a_page(name: str, folder: Path) -> None:
    """What a new user types, with fewer steps for the language model."""
    shutil.rmtree(folder / "runs")
    lm_steps = ["train.max_steps=5", "train.eval_every=5"]
    for text in commands(ROOT / name):
        words = shlex.split(text)
        if words[0] == "torchrun":
            words[:1] = ["python", "-m", "torch.distributed.run"]
        if words[0] != "python" or "parallel=zero3" in words or _CLUSTER.search(text):
            continue
        if {"--watch", "index", "--prompt"} & {*words}:
            continue
        trained = runs(folder / "runs")
        words = [trained[0].name if w.startswith("digits-3fa") else w for w in words]
        more = lm_steps if "experiment=stdlib_lm" in words else []
        command = [sys.executable, *words[1:], *more]
        done = forkserver.run(command, capture_output=True, text=True, cwd=folder, timeout=400)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    names = {run.name.partition("-")[0] for run in runs(folder / "runs")}
    assert names == TRAINED[name]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=str)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:hpctrain|data_prep|tests|conf|slurm|docs)/[\w./-]+)`", page.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []
