"""A `_target_` and its arguments are checked by the source, without importing it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.rules import targets
from hpctrain.config.rules.targets import misfits, problem, signature

MODULE = """
from __future__ import annotations
import dataclasses
from functools import cache
from typing import Any, Literal, NamedTuple, Optional, Union
from torch import nn
raise RuntimeError("imported")

class Net:
    def __init__(self, width: int, *, kind: Literal["a", "b"] = "a", scale: float | None = None):
        pass

class Careless:
    def __init__(self, path: Path = None, rest: Optional[list[str]] = None):
        pass

class Open:
    def __init__(self, width: int, **options: Any):
        pass

class Metered(metaclass=Meta):
    def __init__(self, width): pass

@dataclasses.dataclass
class Data:
    width: int

class Foreign(Net):
    pass

class Row(NamedTuple):
    width: int

class Either(Net):
    if cache:
        def __init__(self, other): pass

@cache
def wrapped(width): pass

def augment(sample, random, sizes: tuple[int, ...] | int = 3): pass
def steps(betas: tuple[float, float]): pass
def several(*layers): pass
if cache:
    def late(width): pass
else:
    late = None
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signature.cache_clear()
    folder = tmp_path / "argued"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .nets import Net as Renamed\n")
    (folder / "nets.py").write_text(MODULE)
    (folder / "lazy.py").write_text("def __getattr__(name): return name")
    (folder / "star.py").write_text("from argued.nets import *")
    (folder / "broken.py").write_text("def f(:")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        *("argued.Renamed", "argued.nets.Net", "argued.nets.late", "argued.nets.cache"),
        *("argued.lazy.x", "argued.star.x", "argued.broken.f", "math.sqrt", "builtins.dict"),
        *("torch.optim.AdamW", "torch.nn.Linear", "torch.compile", "hydra.utils.instantiate"),
    ],
)
def test_what_is_there_or_cannot_be_known(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_own", lambda _: True)
    assert problem(target) == ""


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("none_such.x", "no package 'none_such' here"),
        ("argued.nets.Nett", "argued.nets has no 'Nett'; it has 'Net'"),
        ("argued.nets", "argued.nets is a module; name a class or function in it"),
        ("torch.optim.AdmaW", "torch.optim has no 'AdmaW'; it has 'AdamW'"),
        ("hpctrain.models.MPL", "hpctrain.models has no 'MPL'; it has 'MLP'"),
    ],
)
def test_what_is_not(target: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_own", lambda _: True)
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


def test_the_extra_of_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # the import now fails
    said = "no package 'torchvision' here: pip install 'hpctrain[vision]'"
    assert problem("torchvision.models.resnet18") == said


def found(target: str, given: dict[str, Any]) -> list[str]:
    return [*misfits("model", {"_target_": target, **given}, signature(target))]


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("argued.nets.Net", {"width": 3, "kind": "b", "scale": 1}),
        ("argued.Renamed", {"width": 3, "_convert_": "all"}),
        ("argued.nets.Careless", {"path": "x", "rest": None}),
        ("argued.nets.Careless", {"path": None, "rest": ["a"]}),
        ("argued.nets.Open", {"width": {"_target_": "x.y"}, "other": 1}),
        ("argued.nets.augment", {"_partial_": True, "sizes": [1, 2]}),
        ("argued.nets.Net", {"_args_": [3]}),
        ("argued.nets.steps", {"betas": [0.9, 1]}),
        *(
            (f"argued.nets.{name}", {"anything": 1})
            for name in ("Metered", "Data", "Foreign", "Row", "Either", "wrapped", "several")
        ),
    ],
)
def test_what_python_accepts_or_cannot_be_known_is_accepted(
    target: str, given: dict[str, Any]
) -> None:
    assert found(target, given) == []


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        ("argued.Renamed", {}, "model.width is missing: argued.Renamed needs it (int)"),
        ("argued.nets.Net", {"width": 2.5}, "model.width=2.5: argued.nets.Net takes width: int"),
        ("argued.nets.Net", {"width": 2, "kind": "c"}, "takes kind: Literal['a', 'b']"),
        ("argued.nets.Net", {"width": 2, "scale": "x"}, "takes scale: float | None"),
        ("argued.nets.Net", {"width": 2, "with": 1}, "has no argument with; did you mean width?"),
        ("argued.nets.Careless", {"rest": [1, [2]]}, "takes rest: Optional[list[str]]"),
        ("argued.nets.Open", {"width": True}, "takes width: int"),
        ("argued.nets.steps", {"betas": [0.9]}, "takes betas: tuple[float, float]"),
        ("argued.nets.augment", {"_partial_": True, "sizes": "a"}, "takes sizes: tuple[int, ...]"),
    ],
)
def test_what_python_would_refuse_is_named(target: str, given: dict[str, Any], said: str) -> None:
    (one,) = found(target, given)
    assert said in one
