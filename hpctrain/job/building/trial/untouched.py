"""What a trial of an optimizer leaves as it was: random states, torch's hooks, classes, output."""

import copy
import io
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as registry

from hpctrain.data.randomness import same_generators
from hpctrain.models.dry_run import dry_run


@contextmanager
def untouched(optimizer: torch.optim.Optimizer, seed: int) -> Iterator[None]:
    """Begin with these random seeds, and put back all that others could see.

    This is also what the class of the optimizer, its bases and those of an optimizer within it
    count or list.
    """
    kinds = _kinds(optimizer)
    held = {kind: {n: (v, _content(v)) for n, v in vars(kind).items()} for kind in kinds}
    hooks: tuple[dict[Any, Any], ...] = (
        registry._global_optimizer_pre_hooks,
        registry._global_optimizer_post_hooks,
    )
    before = [dict(each) for each in hooks]
    printed = redirect_stdout(io.StringIO())
    with same_generators(), dry_run(), warnings.catch_warnings(), printed:
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        for each in hooks:
            each.clear()
        try:
            yield
        finally:
            for each, content in zip(hooks, before, strict=True):
                each.clear()
                each.update(content)
            for kind, attributes in held.items():
                _restore(kind, attributes)


def _kinds(optimizer: torch.optim.Optimizer) -> set[type]:
    within = [v for v in vars(optimizer).values() if isinstance(v, torch.optim.Optimizer)]
    found = {kind for each in (optimizer, *within) for kind in type(each).__mro__}
    return found - {*torch.optim.Optimizer.__mro__}


def _content(value: Any) -> Any:
    """Return a copy of a container; None for anything else."""
    return copy.deepcopy(value) if isinstance(value, dict | list | set) else None


def _restore(kind: type, attributes: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a class the attributes that it had, with their contents."""
    for name in [*vars(kind)]:
        if name not in attributes:
            delattr(kind, name)
    for name, (value, content) in attributes.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
        if content is not None and value != content:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
