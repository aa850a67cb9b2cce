"""Who may import whom (see the table in README.md), read from the code itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "hpctrain"
# Each may import itself and what stands in its set, of our own.
LEAVES = {"errors", "explain", "secrets", "__init__"}
CONFIG = LEAVES | {"config", "schema"}
RANKS = {"distributed.slurm", "distributed.port", "distributed.hostlist"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "explain": set(),
    "secrets": set(),
    "disk": set(),
    "schema": set(),
    "config": LEAVES | {"schema"},
    "conf_groups": CONFIG,
    "compose": CONFIG | {"conf_groups"},
    "validate": CONFIG | {"targets"},
    "targets": set(),
    "distributed.hostlist": {"errors"},
    "distributed.port": {"errors"},
    "distributed.slurm": RANKS | {"errors"},
    "distributed.report": RANKS | {"secrets"},
    "distributed.group": CONFIG | RANKS,
    "data": {"errors"},
    "tracking": {"disk", "errors", "lock", "secrets"},
    "lock": set(),
    "git": {"errors"},
    "provenance": {"disk", "errors", "git"},
    "snapshot": CONFIG | {"disk", "git"},
    "rundir": CONFIG | {"disk"},
    "signals": set(),
    "stopfile": {"disk"},
    "datasets": CONFIG | {"data.index", "data.places.origin", "data.samplers.subset"},
    "freeze": CONFIG | {"datasets", "provenance", "rundir", "tracking.store", "validate"},
    "launch": CONFIG
    | {"disk", "freeze", "lock", "provenance", "rundir", "snapshot", "tracking.store", "validate"},
    "commands": CONFIG
    | {"disk", "freeze", "launch", "provenance", "rundir", "snapshot", "stopfile"},
    "summary": CONFIG | {"rundir"},
    "models": set(),
    "tasks": {"errors"},
    "parallel": RANKS,
    "train": CONFIG | RANKS | {"data", "disk", "signals", "tasks", "tracking"},
    "attempt": CONFIG
    | RANKS
    | {"launch.container", "launch.slurm", "provenance", "rundir", "stopfile", "tracking", "train"},
    "build_data": CONFIG | RANKS | {"data"},
    "build": CONFIG | RANKS | {"build_data", "data", "parallel", "rundir", "tracking", "train"},
    "job": CONFIG
    | RANKS
    | {"attempt", "build", "distributed.group", "rundir", "stopfile", "train"},
    "cli": {""},  # everything
    "__main__": {"cli"},
    "__init__": set(),
}
NO_TORCH = (
    *(
        "errors",
        "explain",
        "config",
        "schema",
        "datasets",
        "conf_groups",
        "compose",
        "distributed.slurm",
        "distributed.report",
    ),
    *("distributed.port", "distributed.hostlist", "disk", "targets", "validate"),
    *("data.index", "data.format", "rundir", "freeze", "launch", "summary", "tracking", "cli"),
    *("commands", "stopfile", "signals", "git", "snapshot", "provenance", "lock", "secrets"),
)
# What a data set is, and how it is written; data_prep takes nothing else of us.
FORMAT = {
    *(
        "errors",
        "disk",
        "data.commit",
        "data.field",
        "data.format",
        "data.index",
        "data.moments",
        "data.ragged",
    ),
    *("data.schema", "data.shard", "data.compression"),
    # What a loader reads with, so that `index` and `repack` read the same.
    *(f"data.storage.{name}" for name in ("cache", "chunks", "codecs", "layout", "plain", "table")),
    *("data.samplers", "data.samplers.order", "data.samplers.permutation", "data.images"),
    "data.places.filesystem",
}
NO_HYDRA = ("train", "data", "distributed", "tracking", "parallel", "tasks", "models", "job")


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                # `from hpctrain.launch import slurm` imports a module, not a name in one.
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / (inner.replace(".", "/") + ".py")).is_file()
                yield inner if is_module else str(node.module)


def module_of(file: Path) -> str:
    name = file.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
    return name.removesuffix(".__init__")


def rule(module: str) -> str:
    """The longest key of ALLOWED that covers the module."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in ALLOWED:
            return ".".join(parts[:length])
    raise AssertionError(f"hpctrain.{module} has no rule in tests/test_imports.py: add one")


def within(module: str, prefix: str) -> bool:
    return prefix == "" or module == prefix or module.startswith(prefix + ".")


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if "plugin" not in file.parts]


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_only_down_the_road(file: Path) -> None:
    module = module_of(file)
    if module == "distributed":
        return  # a docstring
    own = rule(module)
    # Packages are imported by way of their modules; the version is everybody's.
    for name in set(imports(file)) - {
        "hpctrain",
        *(f"hpctrain.{p}" for p in ("launch", "tracking")),
    }:
        if within(name, "hpctrain"):
            target = name.removeprefix("hpctrain.")
            allowed = {own, *ALLOWED[own]}
            assert any(within(target, prefix) for prefix in allowed), f"{module} imports {target}"


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_who_may_not_import_torch_hydra_or_mlflow(file: Path) -> None:
    module = module_of(file)
    found = {name.partition(".")[0] for name in imports(file)}
    if any(within(module, prefix) for prefix in NO_TORCH):
        assert "torch" not in found
    if any(within(module, prefix) for prefix in NO_HYDRA):
        assert not {"hydra", "submitit"} & found
    if module not in ("tracking.client", "tracking.mlrun"):
        assert "mlflow" not in found


def test_data_prep_takes_only_the_format() -> None:
    for file in sorted((ROOT / "data_prep").rglob("*.py")):
        for name in imports(file):
            if within(name, "hpctrain") and name != "hpctrain":
                assert name.removeprefix("hpctrain.") in FORMAT, f"{file} imports {name}"
            assert name.partition(".")[0] != "torch"
