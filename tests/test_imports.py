"""Tests of which module may import which others. README.md has the table."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT

# A package (or a module at the top) may import itself and the modules in its set.
EVERYBODY = {"__init__", "errors", "secrets", "disk", "lock", "terminal", "console"}
ALLOWED: dict[str, set[str]] = {
    "config": EVERYBODY,
    "distributed": EVERYBODY | {"config"},
    "data": EVERYBODY,
    "tracking": EVERYBODY,
    "runs": EVERYBODY
    | {"config", *("tracking.store", "tracking.journal"), "checkpoint.manifest"}
    | {*("data.index", "data.places.origin")}
    | {"data.samplers.subset"},
    "launch": EVERYBODY
    | {"config", "runs"}
    | {"tracking.store", "tracking.meta", "tracking.process", "tracking.left"},
    "commands": EVERYBODY
    | {"config", "runs", "launch", "checkpoint.manifest", "job.generate", "tracking.meta"}
    | {"tracking.left"},
    "models": {"errors"},
    "tasks": EVERYBODY | {"data.types", "data.tokenizer"},
    "parallel": EVERYBODY
    | {"config", "data.types", "models.attention", "models.plan", "tasks", "distributed.objects"},
    "checkpoint": EVERYBODY | {"distributed.objects", "distributed.ranks", "distributed.long_work"},
    "faults": EVERYBODY | {"distributed.objects"},
    "train": EVERYBODY
    | {"config", "checkpoint", "data", "distributed.ranks", "distributed.long_work", "faults"}
    | {"parallel", "tasks", "tracking"},
    "job": EVERYBODY
    | {"checkpoint", "config", "data", "distributed", "faults", "parallel", "runs", "tasks"}
    | {"tracking", "train", "launch.container", "launch.queue"},
    "cli": {""},  # it may import everything
    "api": {""},
    "__main__": {"cli"},
    "errors": set(),
    "secrets": {"secret_text", "terminal"},
    "secret_text": set(),
    "disk": set(),
    "lock": set(),
    "terminal": set(),
    "console": {"terminal"},
    "__init__": set(),
}
# These are imported on login nodes, where importing torch would cost each command seconds.
NO_TORCH = (
    *("errors", "secrets", "disk", "lock", "cli", "api", "config", "runs", "launch", "commands"),
    *("terminal", "console", "secret_text"),
    *(
        "tracking",
        "distributed.ranks",
        "distributed.secret",
        "distributed.report",
        "distributed.port",
    ),
    *("distributed.cores", "job.here", "job.compile_cache", "job.requeue", "job.verdict"),
    "checkpoint.manifest",
    *(
        "distributed.hostlist",
        "distributed.variables",
        "distributed.ending",
        "distributed.flight_recorder",
        "faults.early_signals",
        "parallel.memory",
        "data.index",
        "data.format",
    ),
)
NO_HYDRA = (
    *("train", "data", "distributed", "tracking", "parallel", "checkpoint", "faults"),
    *("tasks", "models", "job.train", "runs"),
)
# These define what a data set is and how it is written; data_prep imports nothing else of hpctrain.
FORMAT = {
    *("errors", "disk", "terminal", "console"),
    *("data.commit", "data.field", "data.format", "data.index", "data.moments", "data.ragged"),
    *("data.sample_schema", "data.shard", "data.compression", "data.types"),
    # The loader reads with these, so `index` and `repack` read in the same way.
    *(
        f"data.storage.{name}"
        for name in ("cache", "chunks", "codecs", "inside", "layout", "plain", "scratch", "table")
    ),
    *("data.samplers", "data.samplers.order", "data.samplers.permutation", "data.images"),
    "data.places.filesystem",
}


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


def imports(file: Path) -> Iterator[str]:
    """Yield the name of every module that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
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
    if inner not in ("tracking.client", "tracking.mlrun"):
        assert "mlflow" not in found


def test_data_prep_takes_only_the_format() -> None:
    for module in FILES:
        if within(module, "data_prep"):
            for name in imports(FILES[module]):
                if within(name, "hpctrain") and name != "hpctrain":
                    assert name.removeprefix("hpctrain.") in FORMAT, f"{module} imports {name}"
                assert name.partition(".")[0] != "torch"


def test_no_object_collectives() -> None:
    """They unpickle what other ranks send; `hpctrain.distributed.objects` sends JSON."""
    for module in OURS:
        for node in ast.walk(ast.parse(FILES[module].read_text())):
            if isinstance(node, ast.Attribute | ast.Name | ast.alias):
                name = getattr(node, "attr", None) or getattr(node, "id", None) or node.name
                assert not name.endswith(("_object", "_object_list")), f"{module} uses {name}"


def test_no_circles() -> None:
    """Neither files nor the packages at the top of hpctrain import each other in a circle."""
    files = {
        module: {name for name in imports(file) if name in FILES and name != module}
        for module, file in FILES.items()
    }
    assert circle(files) == []
    packages: dict[str, set[str]] = {}
    for module, names in files.items():
        if module.startswith("hpctrain."):
            tops = {name.split(".")[1] for name in names if name.startswith("hpctrain.")}
            own = module.split(".")[1]
            packages.setdefault(own, set()).update(tops - {own})
    assert circle(packages) == []


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
