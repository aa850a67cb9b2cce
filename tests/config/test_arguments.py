"""The arguments of a `_target_` are checked by its source, without importing it."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.rules.arguments import problems, signature

MODULE = """
from __future__ import annotations
import dataclasses
from functools import cache
from typing import Any, Literal, NamedTuple, Optional, Union
from torch import nn
raise RuntimeError("imported")

class Base:
    def __init__(self, width: int, *, kind: Literal["a", "b"] = "a", scale: "float | None" = None):
        pass

class Net(Base):
    pass

class Careless:
    def __init__(self, ratio: int = 0.5, path: Path = None, rest: Optional[list[str]] = None):
        pass

class Open:
    def __init__(self, width: int, **options: Any):
        pass

class Metered(metaclass=Meta):
    def __init__(self, width): pass

@dataclasses.dataclass
class Data:
    width: int

class Foreign(nn.Linear):
    pass

class Row(NamedTuple):
    width: int

class Either(Base):
    if cache:
        def __init__(self, other): pass

@cache
def wrapped(width): pass

def augment(sample, random, sizes: tuple[int, ...] | int = 3): pass
def steps(betas: tuple[float, float], careful: bool = 0, count: int = False): pass
def several(*layers): pass
def bare(none: tuple[()]): pass
if cache:
    def late(width): pass
else:
    late = None
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The signatures are cached by name.
    signature.cache_clear()
    folder = tmp_path / "argued"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("from .nets import Net as Renamed\nfrom .star import *\n")
    (folder / "star.py").write_text("from .nets import Net as Starred\n")
    (folder / "nets.py").write_text(MODULE)
    (folder / "inner" / "__init__.py").write_text("from ..nets import Careless\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("argued.nets.Net", {"width": 3, "kind": "b", "scale": 1}),
        ("argued.Renamed", {"width": 3, "_convert_": "all"}),
        ("argued.inner.Careless", {"ratio": 0.25, "path": "x", "rest": None}),
        ("argued.inner.Careless", {"ratio": 1, "path": None, "rest": ["a"]}),
        ("argued.nets.Open", {"width": {"_target_": "x.y"}, "other": 1}),
        ("argued.nets.augment", {"_partial_": True, "sizes": [1, 2]}),
        ("argued.nets.Net", {"_args_": [3]}),
        ("argued.nets.steps", {"betas": [0.9, 1], "careful": True, "count": True}),
        ("argued.nets.steps", {"betas": [0.9, 1], "careful": 1}),
        ("argued.nets.bare", {"none": []}),
        *(
            (f"argued.nets.{name}", {"anything": 1})
            for name in (
                *("Metered", "Data", "Foreign", "Row", "Either", "wrapped", "several", "late"),
            )
        ),
    ],
)
def test_what_python_accepts_or_cannot_be_known_is_accepted(
    target: str, given: dict[str, Any]
) -> None:
    assert [*problems("model", {"_target_": target, **given})] == []


@pytest.mark.parametrize(
    ("target", "given", "said"),
    [
        ("argued.Renamed", {}, "model.width is missing: argued.Renamed needs it (int)"),
        ("argued.nets.Net", {"width": 2.5}, "model.width=2.5: argued.nets.Net takes width: int"),
        ("argued.nets.Net", {"width": 2, "kind": "c"}, "takes kind: Literal['a', 'b']"),
        ("argued.nets.Net", {"width": 2, "scale": "x"}, "takes scale: 'float | None'"),
        ("argued.nets.Net", {"width": 2, "with": 1}, "has no argument with; did you mean width?"),
        ("argued.inner.Careless", {"rest": [1, [2]]}, "takes rest: Optional[list[str]]"),
        ("argued.nets.Open", {"width": [1]}, "takes width: int"),
        ("argued.nets.Open", {"width": True}, "takes width: int"),
        ("argued.Starred", {"width": "a"}, "takes width: int"),
        ("argued.nets.steps", {"betas": [0.9]}, "takes betas: tuple[float, float]"),
        ("argued.nets.steps", {"betas": [0.9, "a"]}, "takes betas: tuple[float, float]"),
        ("argued.nets.augment", {"_partial_": True, "sizes": "a"}, "takes sizes: tuple[int, ...]"),
    ],
)
def test_what_python_would_refuse_is_named(target: str, given: dict[str, Any], said: str) -> None:
    (found,) = problems("model", {"_target_": target, **given})
    assert said in found


@pytest.mark.parametrize(
    "target",
    [
        *("hpctrain.models.MLP", "hpctrain.models.Transformer", "hpctrain.models.ConvNet"),
        *("hpctrain.tasks.Classification", "hpctrain.tasks.LanguageModel"),
        *(
            "torch.optim.AdamW",
            "torch.optim.SGD",
            "torch.nn.Linear",
            "hpctrain.data.transforms.RandomCrop",
        ),
    ],
)
def test_it_reads_the_signature_that_python_has(target: str) -> None:
    module, _, name = target.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    found = signature(target)
    assert found is not None
    assert [each.name for each in found.parameters] == [*parameters]
    empty = [each.default is inspect.Parameter.empty for each in parameters.values()]
    assert [each.default is None for each in found.parameters] == empty
