"""Tests of which module may import which others. README.md has the table."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A package (or a module at the top) may import itself and the modules in its set.
EVERYBODY = {"__init__", "errors", "secrets", "disk", "lock", "terminal", "console"}
ALLOWED: dict[str, set[str]] = {
    "hardware": {"errors"},
    "config": EVERYBODY | {"hardware"},
    "distributed": EVERYBODY | {"config"},
    "shards": EVERYBODY,
    "data": EVERYBODY | {"shards"},
    "tracking": EVERYBODY,
    "trackers": EVERYBODY | {"tracking"},
    "monitor": EVERYBODY
    | {
        "config.schema",
        "distributed.ranks",
        "runs.stop_request",
        "tracking.uploader_process",
    }
    | {"tracking.samples"},
    "runs": EVERYBODY
    | {"config", "forecast", *("tracking.store", "tracking.journal", "tracking.page.links")}
    | {"tracking.recorded"}
    | {"checkpoint.manifest", "checkpoint.weight_files"}
    | {*("shards.index", "data.places.origin")}
    | {"data.samplers.subset"},
    "forecast": EVERYBODY | {"config", "hardware", "tracking.journal"},
    "launch": EVERYBODY
    | {"config", "runs", "forecast"}
    | {"tracking.store", "tracking.meta", "tracking.uploader_process", "tracking.left"}
    | {"tracking.page.links", "tracking.refusal"},
    "doctor": EVERYBODY
    | {"config", "runs", "launch", "distributed", "data", "monitor", "tracking.store"}
    | {"tracking.server", "shards.ragged", "hardware"},
    "bench": EVERYBODY
    | {"config", "data", "distributed", "doctor.measures", "faults.stop", "hardware", "job"}
    | {"runs", "shards.types", "tracking.tracker", "training"},
    "top": EVERYBODY | {"commands.select", "runs", "tracking.samples"},
    "commands": EVERYBODY
    | {
        "config",
        "runs",
        "launch",
        "checkpoint.manifest",
        "job.afterwards.text_generation",
        "tracking.meta",
    }
    | {"tracking.left", "tracking.recorded"},
    "plot": EVERYBODY
    | {"commands.select", "tracking.columns", "tracking.journal", "tracking.samples"},
    "report": EVERYBODY
    | {"config.rules.metrics", "config.rules.batch_sizes", "config.frozen", "hardware"}
    | {"launch.slurm.queue", "runs"}
    | {"commands.select", "commands.observations", "commands.state"}
    | {"tracking.journal", "tracking.samples", "tracking.recorded"},
    "models": {"errors"},
    "tasks": EVERYBODY | {"shards", "data.tokenizer", "data.sources.reader"},
    "parallel": EVERYBODY
    | {"config", "shards.types", "models.attention", "models.plan", "tasks", "distributed.objects"}
    | {"models.lora"},
    "checkpoint": EVERYBODY
    | {"models.lora"}
    | {"distributed.objects", "distributed.ranks", "distributed.long_work"},
    "faults": EVERYBODY | {"distributed.objects"},
    "training": EVERYBODY
    | {"config", "checkpoint", "data", "shards", "distributed.ranks", "distributed.long_work"}
    | {"faults", "parallel", "tasks", "tracking", "distributed.objects"},
    "job": EVERYBODY
    | {
        "checkpoint",
        "config",
        "data",
        "shards",
        "distributed",
        "faults",
        "monitor",
        "parallel",
        "runs",
    }
    | {"tasks", "trackers", "tracking", "training", "launch.slurm.container", "launch.slurm.queue"}
    | {"launch.slurm.sbatch", "launch.slurm.script"}
    | {"doctor", "launch.slurm.sbatch_options", "models.lora", "models.experts", "hardware"},
    "trained": EVERYBODY
    | {"checkpoint", "commands.select", "config", "data", "distributed", "job", "models"}
    | {"parallel", "runs", "shards", "tasks", "tracking", "training", "plot.table_file"},
    "plan": EVERYBODY
    | {"hardware", "config", "parallel", "job.building", "shards", "data", "tasks", "runs"}
    | {"models.experts", "models.lora", "models.plan", "doctor.history", "forecast", "launch"},
    "cli": {""},  # the command line may import everything
    "api": {""},
    "__main__": {"cli"},
    "errors": set(),
    "secrets": {"secret_text", "terminal"},
    "secret_text": set(),
    "disk": {"errors"},
    "lock": set(),
    "terminal": set(),
    "console": {"terminal"},
    "__init__": set(),
}
# These are imported on login nodes, where importing torch would cost each command seconds.
NO_TORCH = (
    *("errors", "secrets", "disk", "lock", "cli", "api", "config", "runs", "launch", "commands"),
    *("terminal", "console", "secret_text", "monitor", "top", "hardware", "forecast"),
    *(
        "tracking",
        "report",
        "plot",
        "distributed.ranks",
        "distributed.rendezvous.run_secret",
        "distributed.report",
        "distributed.rendezvous.port",
    ),
    "trained.branch",
    *("distributed.cores", "job.here", "job.compile_cache", "job.requeue", "job.verdict"),
    *("checkpoint.manifest", "checkpoint.matching", "checkpoint.weight_files"),
    *("doctor.checks", "doctor.finding", "doctor.settings", "doctor.login", "doctor.table"),
    *("doctor.command", "doctor.nodes", "doctor.look", "doctor.comparison", "doctor.history"),
    *("doctor.against_hardware", "bench.figures"),
    *(
        "distributed.rendezvous.hostlist",
        "distributed.variables",
        "distributed.leaving",
        "distributed.flight_recorder",
        "faults.early_signals",
        "plan.memory",
        "shards.index",
        "shards.format",
    ),
)
NO_HYDRA = (
    *("training", "shards", "data", "distributed", "tracking", "parallel", "checkpoint", "faults"),
    *("tasks", "models", "job.fit", "runs"),
)
# What data_prep takes of hpctrain: the format, and what must be the same in both programs.
FORMAT = (
    *("errors", "disk", "terminal", "console", "shards"),
    # A shuffle of `repack` and the pictures of `show` are those of a training.
    *("data.samplers.order", "data.samplers.permutation", "data.sources.images"),
    "data.places.filesystem",
)


def module_of(file: Path) -> str:
    """Return the dotted name of a file, such as `hpctrain.shards.index`."""
    name = file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


FILES = {
    module_of(file): file
    for package in ("hpctrain", "data_prep")
    for file in sorted((ROOT / package).rglob("*.py"))
    if "plugin" not in file.parts
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
    return prefix == "" or module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("module", OURS)
def test_only_down_the_road(module: str) -> None:
    inner = module.removeprefix("hpctrain").removeprefix(".") or "__init__"
    own = inner.partition(".")[0]
    assert own in ALLOWED, f"{module} has no rule in tests/test_imports.py: add one"
    for name in imports(FILES[module]):
        if within(name, "hpctrain"):
            target = name.removeprefix("hpctrain").removeprefix(".") or "__init__"
            allowed = {own, *ALLOWED[own]}
            assert any(within(target, prefix) for prefix in allowed), f"{module} imports {name}"


@pytest.mark.parametrize("module", OURS)
def test_who_may_not_import_torch_hydra_or_mlflow(module: str) -> None:
    inner = module.removeprefix("hpctrain").removeprefix(".")
    found = {name.partition(".")[0] for name in imports(FILES[module])}
    if any(within(inner, prefix) for prefix in NO_TORCH):
        assert "torch" not in found
    if any(within(inner, prefix) for prefix in NO_HYDRA):
        assert not {"hydra", "submitit"} & found
    if inner not in (
        "tracking.uploading.client",
        "tracking.uploading.mlrun",
        "tracking.uploading.publish",
        "job.afterwards.mlflow_model",
    ):
        assert "mlflow" not in found


def test_data_prep_takes_only_the_format() -> None:
    for module in FILES:
        if within(module, "data_prep"):
            for name in imports(FILES[module]):
                if within(name, "hpctrain") and name != "hpctrain":
                    inner = name.removeprefix("hpctrain.")
                    assert any(within(inner, each) for each in FORMAT), f"{module} imports {name}"
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
        "hpctrain.parallel.preparing.initial.Initializes",
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


def test_no_object_collectives() -> None:
    """They unpickle what other ranks send; `hpctrain.distributed.objects` sends JSON."""
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

    A file beside other rooms is a room of its own, such as `hpctrain.parallel.mesh`.
    """
    return ".".join(module.split(".")[: depth + 1])


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
