"""Tests of which module may import which others. docs/architecture.md draws it."""

import ast
import functools
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import yaml

from tests.conftest import ROOT

# Every package may import these.
EVERYBODY = (
    "__init__ causes cgroup child console disk errors forks frames generators gone gpu_driver lock "
    "mailbox marks metric_names mounts progress_bar record run_record secrets slow step_names "
    "terminal units yaml_file"
)
# What a package may import besides. Each stands below all that may import it.
ALLOWED = {
    "hardware": "errors",
    "config": "hardware",
    "shards": "",
    "rendezvous": "config",
    "distributed": "config rendezvous",
    "data": "shards",
    "models": "errors",
    "tasks": "data.sources.reader data.tokenizer shards",
    "tracking": "",
    "trackers": "tracking",
    "faults": (
        "config.schema distributed.long_work distributed.objects rendezvous.leaving "
        "rendezvous.port rendezvous.ranks shards.types"
    ),
    "estimates": "config hardware rendezvous.ranks tracking.journal tracking.journal_line",
    "checkpoint": "data.workers.shared distributed.long_work distributed.objects "
    "distributed.tensors estimates.memory_fit faults.copied "
    "models.dry_run models.lora models.quantized models.ties rendezvous.epochs rendezvous.ranks",
    "parallel": (
        "config distributed.objects distributed.tensors models.attention models.dry_run "
        "models.expert_bank models.experts models.formats models.gpu_support models.lora "
        "models.plan models.quantized models.ties shards.types "
        "tasks"
    ),
    "slurm": "config rendezvous.hostlist rendezvous.ranks",
    "restarts": "",
    "runs": (
        "checkpoint.files config data.places.origin data.samplers.subset estimates "
        "rendezvous.epochs rendezvous.flight_recorder rendezvous.ranks restarts shards.index slurm "
        "tracking.journal tracking.page.links tracking.recorded tracking.samples tracking.store"
    ),
    "monitor": ("config.schema rendezvous.ranks runs.state.stop_request tracking.samples"),
    "training": (
        "checkpoint config data distributed.long_work distributed.objects distributed.tensors "
        "faults models.dry_run parallel rendezvous.ranks shards tasks tracking"
    ),
    "launch": (
        "config estimates runs slurm tracking.pending_upload tracking.meta tracking.page.links "
        "tracking.store"
    ),
    "search": "config estimates launch restarts runs slurm tracking",
    "doctor": (
        "config distributed launch monitor rendezvous runs slurm tracking.server tracking.store"
    ),
    "job": (
        "checkpoint config data distributed doctor estimates faults hardware launch.function_call "
        "models.dry_run models.experts models.lora models.quantized monitor "
        "parallel rendezvous restarts runs search.trial_run search.workers shards slurm tasks "
        "trackers tracking training"
    ),
    "commands": (
        "checkpoint.files config launch runs search.standing search.trials "
        "search.worker_arrays slurm tracking.pending_upload "
        "tracking.meta tracking.recorded tracking.samples"
    ),
    "report": (
        "config hardware job.summary runs search.standing search.trials "
        "slurm.allocations slurm.queue tracking.columns tracking.journal tracking.recorded "
        "tracking.samples"
    ),
    "trained": (
        "checkpoint config data distributed job models parallel rendezvous runs "
        "shards tasks tracking training"
    ),
    "plan": (
        "config data distributed.devices estimates hardware job.building launch "
        "models.dry_run models.experts models.lora models.plan models.quantized models.ties "
        "monitor.gpus parallel rendezvous "
        "runs shards slurm tasks"
    ),
    "bench": (
        "config data distributed doctor.measures faults.stop hardware job parallel.precision "
        "rendezvous runs shards.types tracking.tracker training"
    ),
}
# The modules at the top: these may import no more than this. `*` is everything.
APART = {
    "cli": "*",
    "help": "config yaml_file",
    "api": "*",
    "__main__": "cli",
    "causes": "errors frames",
    "cgroup": "",
    "child": "disk forks secrets",
    "errors": "",
    "secrets": "secret_text terminal",
    "secret_text": "",
    "disk": "errors",
    "record": "disk errors",
    "run_record": "disk errors mailbox record",
    "forks": "",
    "frames": "",
    "marks": "forks",
    "generators": "",
    "gone": "errors yaml_file",
    "gpu_driver": "",
    "lock": "disk forks mounts",
    "mounts": "",
    "mailbox": "disk errors record",
    "metric_names": "",
    "terminal": "",
    "console": "terminal",
    "progress_bar": "",
    "yaml_file": "disk errors",
    "slow": "",
    "step_names": "",
    "units": "",
    "__init__": "",
}
# These rooms and modules are imported on login nodes, where importing torch would cost each command
# seconds; WITH_TORCH are the exceptions within them.
NO_TORCH = (
    "api causes cgroup checkpoint.files child cli commands config console disk doctor errors "
    "estimates faults.early_signals faults.limits faults.observed faults.observer "
    "faults.process_state forks frames gpu_driver hardware job.compile_cache job.here job.pieces "
    "job.verdict job.worker launch lock mailbox marks mounts "
    "metric_names monitor plan.memory progress_bar record rendezvous report restarts run_record "
    "runs search secret_text secrets shards slow slurm step_names terminal tracking "
    "trained.commands units yaml_file"
)
WITH_TORCH = "doctor.measures shards.types"
NO_HYDRA = (
    "checkpoint data distributed faults job.fit models parallel rendezvous runs shards tasks "
    "tracking training"
)
# What data_prep takes of hpctrain: the format, and what must be the same in both programs. A
# shuffle of `repack` and the pictures of `show` are those of a training.
FORMAT = (
    "cgroup errors disk gone record terminal console progress_bar shards data.samplers.groups "
    "data.samplers.order data.samplers.permutation data.sources.images mounts"
)
WITH_MLFLOW = "tracking.uploading.client tracking.uploading.mlrun tracking.uploading.publish"


def module_of(file: Path) -> str:
    """Return the dotted name of a file, such as `hpctrain.data.shards.index`."""
    name = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


FILES = {
    module_of(file): file
    for package in ("hpctrain", "data_prep")
    for file in sorted((ROOT / package).rglob("*.py"))
}
OURS = [name for name in FILES if name.startswith("hpctrain")]


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[str]:
    """Yield the name of every module that a file imports, anywhere in it."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                # `from hpctrain.launch import slurm` imports a module, not a name in one.
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def test_only_down_the_road() -> None:
    wrong = []
    for module in OURS:
        inner = module.removeprefix("hpctrain").removeprefix(".") or "__init__"
        own = inner.partition(".")[0]
        assert own in {*ALLOWED, *APART}, f"{module} has no rule in tests/test_imports.py: add one"
        allowed = APART[own] if own in APART else f"{EVERYBODY} {ALLOWED[own]}"
        for name in imports(FILES[module]):
            if within(name, "hpctrain") and allowed != "*":
                target = name.removeprefix("hpctrain").removeprefix(".") or "__init__"
                if not any(within(target, each) for each in (own, *allowed.split())):
                    wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_the_packages_are_listed_from_the_ground_up() -> None:
    below = {*APART}
    for package, allowed in ALLOWED.items():
        assert {name.partition(".")[0] for name in allowed.split()} <= below, package
        below.add(package)


def test_who_may_not_import_torch_hydra_or_mlflow() -> None:
    wrong = []
    for module in OURS:
        inner = module.removeprefix("hpctrain").removeprefix(".")
        refused: set[str] = set()
        apart = any(within(inner, prefix) for prefix in WITH_TORCH.split())
        if not apart and any(within(inner, prefix) for prefix in NO_TORCH.split()):
            refused |= {"torch"}
        if any(within(inner, prefix) for prefix in NO_HYDRA.split()):
            refused |= {"hydra", "submitit"}
        if inner not in WITH_MLFLOW.split():
            refused |= {"mlflow"}
        found = {name.partition(".")[0] for name in imports(FILES[module])}
        wrong += [f"{module} imports {name}" for name in found & refused]
    assert wrong == []


def test_data_prep_takes_only_the_format() -> None:
    for module in FILES:
        if within(module, "data_prep"):
            for name in imports(FILES[module]):
                if within(name, "hpctrain") and name != "hpctrain":
                    inner = name.removeprefix("hpctrain.")
                    assert any(within(inner, each) for each in FORMAT.split()), (
                        f"{module} imports {name}"
                    )
                assert name.partition(".")[0] != "torch"


def test_a_name_that_only_its_module_uses_begins_with_an_underscore() -> None:
    """So a reader knows what a module offers to others, and what is free to change."""
    used: dict[str, set[Path]] = {}
    suffixes = {".py", ".pyi", ".md", ".yaml", ".sbatch", ".toml"}
    folders = ("hpctrain", "data_prep", "tests", "conf", "docs", "slurm")
    found = [path for name in folders for path in (ROOT / name).rglob("*.*")]
    for path in [*found, ROOT / "pyproject.toml"]:
        if path.suffix in suffixes:
            for word in set(re.findall(r"\w+", path.read_text())):
                used.setdefault(word, set()).add(path)
    alone = [
        f"{module}.{name}"
        for module, file in FILES.items()
        for name in _defined(tree(file))
        if not name.startswith("_") and used[name] == {file}
    ]
    # The types of values that other modules get.
    assert set(alone) <= {
        "hpctrain.launch.function.LocalFunctionJob",
    }


def _defined(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (each.id for each in targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_who_may_start_programs_that_hear_the_signals_of_the_job() -> None:
    """Slurm signals every process of a step: a child of a rank that dies of it fails the run."""
    found = {module for module in OURS if "subprocess.run(" in FILES[module].read_text()}
    assert found == {  # on the login node, and in the batch script
        "hpctrain.launch.sweeps.foreign_targets",
        "hpctrain.runs.code.git",
    }


def test_no_object_collectives() -> None:
    """They unpickle what other ranks send; `hpctrain.engine.distributed.objects` sends JSON."""
    for module in OURS:
        for node in ast.walk(tree(FILES[module])):
            if isinstance(node, ast.Attribute | ast.Name | ast.alias):
                name = getattr(node, "attr", None) or getattr(node, "id", None) or node.name
                assert not name.endswith(("_object", "_object_list")), f"{module} uses {name}"


def test_no_circles() -> None:
    """Neither files, nor packages at the top, nor rooms in them import each other in a circle."""
    files = {
        module: {name for name in imports(file) if name in FILES and name != module}
        for module, file in FILES.items()
    }
    assert circle(files) == []
    for depth in (1, 2):
        rooms: dict[str, set[str]] = {}
        for module, names in files.items():
            if module.startswith("hpctrain."):
                own = room_of(module, depth)
                into = {room_of(name, depth) for name in names if name.startswith("hpctrain.")}
                rooms.setdefault(own, set()).update(into - {own})
        assert circle(rooms) == []


def room_of(module: str, depth: int) -> str:
    """Return the package of a module, at most `depth` floors below hpctrain.

    A file beside other rooms is a room of its own, such as `hpctrain.engine.parallel.mesh`.
    """
    return ".".join(module.split(".")[: depth + 1])


def test_make_lint_and_pre_commit_check_every_shell_script() -> None:
    names = [
        path.relative_to(ROOT).as_posix()
        for folder in ("hpctrain", "data_prep", "tests", "slurm", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.read_bytes()[:30].split(b"\n")[0].endswith((b"bash", b"/sh"))
    ]
    names += [path.relative_to(ROOT).as_posix() for path in (ROOT / "hpctrain").rglob("*.sh")]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (pattern,) = (hook["files"] for hook in hooks if hook["id"] == "shellcheck")
    (patterns,) = re.findall(r"^\t\tshellcheck (.*);", (ROOT / "Makefile").read_text(), re.M)
    by_make = {
        path.relative_to(ROOT).as_posix() for each in patterns.split() for path in ROOT.glob(each)
    }
    assert len(names) > 9
    assert {*names} == by_make == {name for name in names if re.search(pattern, name)}


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Return the names of one circle, with the first again at the end, or [] if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for following in sorted(arrows.get(name, ())):
                if found := visit(following, [*path, name]):
                    return found
            done.add(name)
        return []

    for name in sorted(arrows):
        if found := visit(name, []):
            return found
    return []


def test_benchmarks_import_what_exists() -> None:
    """They run by hand and seldom, so a name that has moved would be seen months later."""
    gone = []
    for path in sorted((ROOT / "tests" / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpctrain"):
                module = import_module(str(node.module))
                names = [each.name for each in node.names if not hasattr(module, each.name)]
                inside = [
                    each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))
                ]
                gone += [f"{path.name}: {name}" for name in names if name not in inside]
    assert gone == []
