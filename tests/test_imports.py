"""Tests of which module may import which others. docs/architecture.md draws it."""

import ast
import functools
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import yaml

from hpctrain.base import offered
from tests.conftest import ROOT

# The rooms, from the ground up: each may import those before it.
CORE = ["base", "config", "cluster", "data", "tracking", "runs", "launch", "engine"]
# The core never imports these, not even in a function (`hpctrain.base.offered`). `results` are
# what comes after a training, `insight` looks at everything.
EXTENSIONS = [
    *["models", "tasks", "trackers", "addons", "commands"],
    *["search", "results", "insight", "testing"],
]
# They put it together: what users import, and the command line.
# `job` and `slurm` are names of before, which batch scripts in queues and copies of templates call.
DOORS = ["errors", "training", "job", "slurm", "api", "cli", "__main__"]
ROOMS = [*CORE, "__init__", *EXTENSIONS, *DOORS]
# These rooms and modules are imported on login nodes, where importing torch would cost each command
# seconds; WITH_TORCH are the exceptions within them.
NO_TORCH = (
    "addons.node api base cli cluster commands config data.shards engine.faults.early_signals "
    "engine.faults.limits engine.faults.observed engine.faults.observer "
    "engine.faults.process_state engine.job.call engine.job.compile_cache engine.job.here "
    "engine.job.verdict errors insight.doctor insight.estimates insight.monitor "
    "insight.reference insight.report insight.shell launch results.commands runs search testing "
    "tracking"
)
WITH_TORCH = "insight.doctor.measures data.shards.types"
NO_HYDRA = (
    "addons base cluster data engine.checkpoint engine.distributed engine.faults "
    "engine.job.fit engine.layers engine.supervised engine.parallel engine.parts "
    "engine.tasks models runs tasks trackers tracking"
)
# What data_prep takes of hpctrain: the format, and what must be the same in both programs. A
# shuffle of `repack`, the pictures of `images` and the reading of shards are those of a training.
FORMAT = (
    "base data.places.origin data.shards data.samplers.groups "
    "data.samplers.order data.sources.images data.sources.reader data.tokenizer"
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


def room(module: str) -> str:
    """Return the folder or file at the top; a plugin of Hydra is of the room in which it lies."""
    return (module.removeprefix("hpctrain").removeprefix(".") or "__init__").partition(".")[0]


def test_imports_only_look_down() -> None:
    """The rule of the house, for every import, in functions and under TYPE_CHECKING, too."""
    wrong = [
        f"{module} imports {name}"
        for module in OURS
        for name in imports(FILES[module])
        if within(name, "hpctrain") and ROOMS.index(room(name)) > ROOMS.index(room(module))
    ]
    assert wrong == []


def test_the_page_of_the_architecture_draws_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (drawing,) = re.findall(r"^## The packages\n\n```text\n(.*?)^```", page, re.M | re.S)
    drawn = re.findall(r"^.{13}(\w+(?:, \w+)*)  ", drawing, re.M)
    folders = {path.parent.name for path in (ROOT / "hpctrain").glob("*/__init__.py")}
    assert sorted(", ".join(drawn).split(", ")) == sorted({*folders, *DOORS})
    assert {*ROOMS} == {*folders, *DOORS, "__init__"}
    (inside,) = re.findall(r"^.{13}insight +(.*)$", drawing, re.M)
    rooms = {path.parent.name for path in (ROOT / "hpctrain/insight").glob("*/__init__.py")}
    assert {*inside.split(", ")} == rooms


def test_the_core_names_no_module_of_an_extension() -> None:
    """A name in a text is as good as an import; models, tasks and trackers are names of users.

    What the core may ask an extension for is in base/offered.pyi.
    """
    rooms = r"(search|results|insight|addons)[\w.]*|commands\.\w+"
    hidden = re.compile(rf"hpctrain\.({rooms})")
    wrong = [
        f"{module}: {node.value}"
        for module in OURS
        if room(module) in CORE
        for node in ast.walk(tree(FILES[module]))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if hidden.fullmatch(node.value)
    ]
    assert wrong == []


def test_what_extensions_offer_is_there() -> None:
    names = offered.table()
    asked = {
        node.attr
        for module in OURS
        for node in ast.walk(tree(FILES[module]))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "offered"
    }
    assert asked == names.keys()
    assert all(getattr(offered, name) is not None for name in names)


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


def test_the_name_of_a_public_class_is_that_of_one_thing() -> None:
    where: dict[str, list[str]] = {}
    for module, file in FILES.items():
        for node in tree(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def test_no_function_has_ten_arguments() -> None:
    """But a model that a config describes, and the loader, which is written as torch's is."""
    many = [
        f"{module}:{node.lineno} {node.name}"
        for module, file in FILES.items()
        if room(module) != "models" and module != "hpctrain.data.loading.loader"
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for given in [[*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        if len({one.arg for one in given} - {"self", "cls"}) >= 10
    ]
    assert many == []


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
    assert alone == []


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
    assert found == {  # on the login node, in the batch script, and in tests
        "hpctrain.insight.foreign_targets",
        "hpctrain.runs.code.provenance",
        "hpctrain.testing.fixtures",
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
