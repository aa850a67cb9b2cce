"""A `_target_` is checked without importing it."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.config.rules.targets import problem

MODULE = """
import os.path
from math import sqrt as root
try:
    import numpy as np
except ImportError:
    np = None
if np:
    here: int = 1
    first, (second, *third) = 1, (2, 3)
for each in (1, 2):
    pass
with open(os.devnull) as opened:
    pass
def function():
    global late
    late = inner = 1
class Class:
    attribute = 1
"""
THERE = ("os", "root", "np", "here", "first", "second", "third", "each", "opened", "late")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\nfrom mine.a import Class")
    (folder / "a.py").write_text(MODULE)
    (folder / "inner" / "__init__.py").write_text("from mine.a import *")
    (folder / "inner" / "star.py").write_text("from mine.inner.compiled import *")
    (folder / "lazy").mkdir()
    (folder / "lazy" / "__init__.py").write_text("def __getattr__(name): return name")
    (folder / "lazy" / "models.py").write_text("")
    (folder / "inner" / "lazy.py").write_text("def __getattr__(name): return name")
    (folder / "inner" / "made.py").write_text("for n in 'ab':\n    globals()[n] = 1")
    (folder / "inner" / "broken.py").write_text("def f(:")
    (folder / "inner" / "compiled.so").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


@pytest.mark.parametrize(
    "target",
    [
        *(f"mine.a.{name}" for name in (*THERE, "function", "Class", "Class.attribute")),
        "mine.Class",
        *(
            "mine.inner.Class",
            "mine.inner.star.unknown",
            "mine.inner.lazy.x",
            "mine.lazy.part.x",
            "mine.inner.made.a",
            "mine.inner.broken.f",
        ),
        *("math.sqrt", "builtins.dict", "torch.optim.AdamW", "torch.nn.Linear", "torch.compile"),
        *("numpy.linalg.norm", "h5py.File", "sklearn.svm.SVC", "hydra.utils.instantiate"),
    ],
)
def test_what_is_there(package: Path, target: str) -> None:
    assert problem(target) == ""


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("none_such.x", "no package 'none_such' here"),
        ("mine.a.inner", "mine.a has no 'inner'"),
        ("mine.a.Clas", "mine.a has no 'Clas'; it has 'Class'"),
        ("mine.aa.Class", "mine has no 'aa'; it has 'a'"),
        ("mine.inner.Clas", "mine.inner has no 'Clas'; it has 'Class'"),
        ("mine.lazy.model.Net", "mine.lazy has no module 'model'; it has 'models'"),
        ("mine.inner", "mine.inner is a module; name a class or function in it"),
        ("torch.nn.Lineer", "torch.nn has no 'Lineer'; it has 'Linear'"),
        ("torch.optim.AdmaW", "torch.optim has no 'AdmaW'; it has 'AdamW'"),
    ],
)
def test_what_is_not(package: Path, target: str, said: str) -> None:
    assert problem(target) == said


def test_nothing_is_imported() -> None:
    program = """
import sys
from hpctrain.config.rules.targets import problem
before = set(sys.modules)
assert not problem("torch.optim.lr_scheduler.LambdaLR") and problem("torch.nn.functional")
assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"torch", "numpy"}
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_it_agrees_with_python() -> None:
    """Every name that one of our modules has is accepted."""
    for name in (
        "hpctrain.models.transformer",
        "hpctrain.data.transforms",
        "hpctrain.data.loading.loader",
    ):
        for found in vars(importlib.import_module(name)):
            assert found.startswith("__") or problem(f"{name}.{found}") == "", found


def test_the_extra_of_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # the import now fails
    said = "no package 'torchvision' here: pip install 'hpctrain[vision]'"
    assert problem("torchvision.models.resnet18") == said
