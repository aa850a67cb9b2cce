"""Every command of the README, from top to bottom, in a folder like a new user's.

The fast test accepts each command as the program itself does: commands of data_prep run on tiny
files, sweeps run with `launch.dry_run=true`, trainings are composed and checked with their data.
The slow test trains.

What does not run: `make` and `apt-get` install (tests/test_wheel.py does), the cluster's commands
need root (tests/slurm runs them), `mlflow ui` is a server, and Optuna's search needs the results of
its trials (tests/launch/test_sweepers.py has them).
"""

import contextlib
import io
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.cli import main as data_prep
from hpctrain.cli import main as hpctrain
from hpctrain.config.compose import compose
from hpctrain.config.schema import Config
from hpctrain.runs.freeze import check, freeze
from tests import forkserver
from tests.conftest import ROOT, runs

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
PROGRAMS = ("make", "python", "torchrun", "sbatch", "slurm/", "eval", "mlflow", "apt-get")
_CLUSTER = re.compile(r"launch\.nodes|site[.=]|sweeper=optuna")  # these need a cluster
# A model for the README's experiment `mine`.
MY_NET = """\
from torch import nn

class MyNet(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
"""
SAMPLES = """\
import numpy as np

def samples():
    for number in range(20):
        yield {"signal": np.arange(4.0) + number}
"""


def commands() -> list[str]:
    """Return the commands of the README in order, on one line each and without comments."""
    text = "".join(block for language, block in BLOCKS if not language).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith(PROGRAMS)]
    return [re.sub(r"\s+#\s.*|\s+$", "", line) for line in lines]


def test_the_environment_is_activated_before_the_first_command_that_needs_it() -> None:
    lines = [line for language, block in BLOCKS if not language for line in block.splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith(("python", "torchrun")))
    assert "source .venv/bin/activate" in lines[:first]


@pytest.fixture
def folder(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the README names, which is the current one."""
    monkeypatch.chdir(tmp_path)
    # Slurm's commands have a test of their own: here -m runs on this machine.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").symlink_to(shutil.which("git") or "no git")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits)
    _write_sources(tmp_path, np.random.default_rng(0))
    (experiment,) = (text for language, text in BLOCKS if language == "yaml")
    files = {
        "my_configs/experiment/mine.yaml": experiment,
        "my_configs/site/mine.yaml": (ROOT / "conf/site/example.yaml").read_text(),
        "my_package.py": MY_NET,
        "mine.py": SAMPLES,
    }
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


def call(main: Callable[[], Any], *argv: str) -> str:
    """Call the `main` of a program in this process; return its output. It must succeed."""
    said = io.StringIO()
    code: Any = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        patch.setattr(sys, "argv", ["program", *argv])
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    assert not code, f"{shlex.join(argv)}: {code}\n{said.getvalue()}"
    return said.getvalue()


def checked(words: list[str], ranks: int | None) -> Config:
    """Compose and check the config of a training, with its data."""
    config = compose(words)
    assert config is not None
    check(config, ranks)
    return config


def accept(words: list[str], run: Path) -> None:
    """Let a program accept a command.

    Args:
        words: The command.
        run: A run directory, for the commands that name a run.
    """
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
        case ["apt-get", "install", "--no-install-recommends", *packages]:
            needed = _dev_cluster("requirements").PACKAGES
            assert {*packages} == {*needed} - {"util-linux"}  # it is everywhere
        case ["slurm/dev-cluster", *rest]:
            _dev_cluster("cli").parse(rest)
        case ["eval", "$(slurm/dev-cluster env)"]:
            _dev_cluster("cli").parse(["env"])
        case ["mlflow", "ui", "--backend-store-uri", uri]:
            assert (
                uri.replace("$PWD", os.getcwd()) == checked(["experiment=digits"], 1).tracking.uri
            )
        case ["sbatch", script, *rest]:
            assert (ROOT / script).is_file()
            checked(rest, 1)
        case ["torchrun", "--nproc-per-node", ranks, "-m", "hpctrain", *rest]:
            checked(rest, int(ranks))
        case ["python", "-m", "data_prep", "sample", *_] | [
            "python",
            "-m",
            "hpctrain",
            "generate",
            *_,
        ]:
            pass  # they take minutes; the slow test runs them
        case ["python", "-m", "data_prep", *rest]:
            call(lambda: data_prep(rest))
        case ["python", "-m", "hpctrain", "status", "--watch"]:
            pass  # it would wait for a run
        case ["python", "-m", "hpctrain", *rest] if "hydra/sweeper=optuna" in rest:
            checked([word for word in rest if not word.startswith(("-m", "hydra", "'"))][:1], 1)
        case ["python", "-m", "hpctrain", "-m", *rest]:
            site = ["--config-dir", "my_configs"] if "site=mine" in rest else []
            call(hpctrain, *site, "-m", *rest, "launch.dry_run=true")
        case ["python", "-m", "hpctrain", "resume", *rest]:
            call(hpctrain, "resume", *named(rest, run), "launch.dry_run=true")
        case ["python", "-m", "hpctrain", *rest] if any("=" in word for word in rest):
            if "experiment=stdlib_lm" not in rest:  # its data takes a minute
                checked(rest, 1)
        case ["python", "-m", "hpctrain", *rest]:
            call(hpctrain, *named(rest, run))
        case _:
            raise AssertionError("this test does not know the command")


def named(words: list[str], run: Path) -> list[str]:
    """Return the words with the name of a real run in place of the README's."""
    return [run.name if word.startswith("digits-3fa") else word for word in words]


def _dev_cluster(part: str) -> Any:
    """Return a module of the development cluster, which is no installed package."""
    sys.path.insert(0, str(ROOT / "slurm"))
    try:
        return import_module(f"dev_cluster.{part}")
    finally:
        sys.path.pop(0)


def test_every_command_of_the_readme_is_accepted(folder: Path) -> None:
    config = checked(["experiment=digits"], 1)
    directory = check(config)
    freeze(config, directory)
    directory.logs.mkdir(exist_ok=True)
    (directory.logs / "1_0.rank0.log").write_text("a line\n")
    found = [words for text in commands() if (words := shlex.split(text))]
    assert len(found) > 40
    failed = []
    for words in found:
        expanded = [name for word in words for name in _glob(word)]
        try:
            accept(expanded, directory.path)
        except Exception as error:
            failed.append(f"{shlex.join(words)}\n    {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    calls, example = (text for language, text in BLOCKS if language == "python")
    exec(example, {})
    compile(calls, "README.md", "exec")  # tests/launch/test_api.py makes such calls
    names = set(re.findall(r"hpctrain\.(\w+)\(", calls))
    assert names == {"submit", "train", "load_run", "submit_function"}
    assert all(callable(getattr(import_module("hpctrain"), name)) for name in names)


def _glob(word: str) -> list[str]:
    return [str(path) for path in Path().glob(word)] if "*" in word and "(" not in word else [word]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_trainings_of_the_readme(folder: Path, digits: Path) -> None:
    """What a new user types, with fewer steps for the language model."""
    shutil.rmtree(folder / "runs")
    begin = time.monotonic()
    lm_steps = ["train.max_steps=5", "train.eval_every=5"]
    for text in commands():
        words = shlex.split(text)
        if words[0] == "torchrun":
            words[:1] = ["python", "-m", "torch.distributed.run"]
        if words[0] != "python" or "parallel=zero3" in words or _CLUSTER.search(text):
            continue
        if {"--watch", "index", "generate"} & {*words}:
            continue
        trained = runs(folder / "runs")
        words = [trained[0].name if w.startswith("digits-3fa") else w for w in words]
        more = lm_steps if "experiment=stdlib_lm" in words else []
        command = [sys.executable, *words[1:], *more]
        done = forkserver.run(command, capture_output=True, text=True, cwd=folder, timeout=400)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        print(f"{time.monotonic() - begin:.1f} s after the start: {text}")
    names = {run.name.partition("-")[0] for run in runs(folder / "runs")}
    assert names == {"digits", "mine", "stdlib_lm"}
