"""What a user's model, task and optimizer hold in attributes, where no checkpoint finds it.

    class Codes(nn.Module):
        self.calls = 0                                        an attribute
        self.register_buffer("queue", …, persistent=False)    a buffer that no checkpoint has
        self.schedule = Schedule()                            an object with attributes of its own

The classes of torch and of hpctrain are left out: their own tests know what they keep.
"""

import copy
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.terminal import few
from hpctrain.data import generators
from hpctrain.engine.tasks.task import is_foreign, name_of

_OF_MODULES = {  # what every module has, and every optimizer, and what evaluations reset
    *vars(nn.Module()),
    *vars(torch.optim.SGD([torch.zeros(1, requires_grad=True)])),
    "metrics",
}
_ATOMS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_MANY, _DEPTH = 10_000, 4  # elements of a container that are looked at; levels
_LARGEST = 64 << 20  # bytes of a tensor that is copied


@dataclass(frozen=True)
class _Held:
    """A value, the dict of attributes or buffers that holds it, and a copy of what it was."""

    name: str  # such as task.schedule.step
    place: dict[str, Any]
    key: str
    value: Any
    copied: Any


class HeldValues:
    """What some objects hold in attributes, at one moment.

    Of the model, buffers that a checkpoint has are left out; of the task, none are.
    """

    def __init__(self, model: nn.Module, task: Any, optimizer: Any = None) -> None:
        self._things = {"model": model, "task": task, "optimizer": optimizer}
        self.held = {(id(h.place), h.key): h for h in self._find()}

    def changed(self) -> list[str]:
        """Return the names of the values that are others now, in their order."""
        now = HeldValues(**self._things)
        return [
            held.name
            for key, held in now.held.items()
            if key not in self.held or not _same(self.held[key].copied, held.copied)
        ]

    def grown(self, since: "HeldValues") -> set[str]:
        """Return the names of the whole numbers that are larger here than they were then."""
        return {
            held.name
            for key, held in self.held.items()
            if (before := since.held.get(key)) is not None
            and _number(held.copied) > _number(before.copied)
        }

    def restore(self) -> None:
        """Put the values back, also those within lists, arrays and tensors."""
        for key, held in HeldValues(**self._things).held.items():
            if key not in self.held:
                del held.place[held.key]
        for held in self.held.values():
            held.place[held.key] = _with_content(held.value, held.copied)

    def _find(self) -> Iterator[_Held]:
        for name, thing in self._things.items():
            for label, place, key, value in _walk(name, thing, stored=name == "model"):
                label = label.replace("model.module.", "model.", 1)  # without DDP's wrapper
                yield _Held(label, place, key, value, _copy(value))


def check_parameters(task: Any) -> None:
    """Refuse a task with parameters: no optimizer would train them, and no checkpoint has them."""
    found = []
    for label, part in _reach("task", task):
        held = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        held |= part._parameters if isinstance(part, nn.Module) else {}
        found += [
            f"{label}.{key}".removeprefix("task.")
            for key, value in held.items()
            if any(
                isinstance(each, torch.Tensor) and each.requires_grad and each.is_leaf
                for each in tree_leaves(value)
            )
        ]
    if found:
        raise ConfigError(
            f"task._target_={name_of(task)} has parameters of its own ({few(found, 3)}): they "
            "would not be trained, and no checkpoint has them. Make them parameters of the model, "
            "which gives them to the task with its outputs; or call requires_grad_(False), if they "
            "are constants"
        )


def _walk(name: str, thing: Any, *, stored: bool) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Yield name, place, key and value of what the foreign objects in reach hold.

    Buffers that a checkpoint of modules has are left out if they are `stored`.
    """
    for label, part in _reach(name, thing):
        if not is_foreign(part):
            continue
        buffers = part._buffers if isinstance(part, nn.Module) else {}
        kept = buffers.keys() - part._non_persistent_buffers_set if stored and buffers else set()
        for place in (buffers, vars(part)):
            for key, value in [*place.items()]:
                parameter = isinstance(value, nn.Parameter)
                if key not in {*_OF_MODULES, *kept} and not parameter and _is_plain(value):
                    yield f"{label}.{key}", place, key, value


def _reach(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, and the objects of foreign classes, that are in reach, each once."""
    seen: set[int] = set()
    waiting = deque([(name, thing, _DEPTH)])
    while waiting:
        label, one, left = waiting.popleft()
        if id(one) in seen or not left or isinstance(one, type) or _is_plain(one):
            continue
        seen.add(id(one))
        parts: dict[Any, Any] = {}
        if isinstance(one, dict):
            parts = one
        elif isinstance(one, list | tuple):
            parts = dict(enumerate(one[:_MANY]))
        elif isinstance(one, nn.Module) or (hasattr(one, "__dict__") and is_foreign(one)):
            yield label, one
            parts = {key: value for key, value in vars(one).items() if key not in _OF_MODULES}
            if isinstance(one, nn.Module):
                waiting += [(f"{label}.{key}", m, left) for key, m in one._modules.items()]
        waiting += [(f"{label}.{key}", part, left - 1) for key, part in parts.items()]


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Return whether a value is a number, text, tensor, generator, or a container of such."""
    if isinstance(value, torch.Tensor):
        return value.nbytes <= _LARGEST and value.layout == torch.strided
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.nbytes <= _LARGEST
    if isinstance(value, (*_ATOMS, *generators.KINDS)):
        return True
    if not depth or type(value) not in (list, tuple, dict, set, deque) or len(value) > _MANY:
        return False
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(part, depth - 1) for part in parts)


def _copy(value: Any) -> Any:
    """Return a copy that later changes in place leave as it is; of a generator, its state."""

    def of(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.detach().clone()
        if isinstance(part, generators.KINDS):
            return copy.deepcopy(generators.state_of(part))
        return copy.copy(part)

    return tree_map(of, value)


def _with_content(value: Any, copied: Any) -> Any:
    """Return a value after it was given the content that it had when it was copied."""
    if isinstance(value, generators.KINDS):
        generators.set_state(value, copied)
    elif _same(_copy(value), copied):
        pass
    elif isinstance(value, torch.Tensor) and value.shape == copied.shape:
        value.data.copy_(copied)
    elif isinstance(value, np.ndarray) and value.shape == copied.shape:
        np.copyto(value, copied)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(_copy(copied))
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(_copy(copied))
    else:
        return copied
    return value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return alike and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray):
        equal = a.dtype.kind in "fc"
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=equal)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or bool(a != a and b != b)


def _number(value: Any) -> float:
    """Return a whole number; NaN, which is larger than nothing, for anything else."""
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.dtype.is_floating_point:
        return float(value)
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return float(value) if whole else math.nan
