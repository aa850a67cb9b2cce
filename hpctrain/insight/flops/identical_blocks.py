"""Blocks that are alike are measured once: a model of 126 layers costs as much as one of two.

    measure(first block of each group) ── base
    measure(first two of a group) ─────── base + one block
    whole = base + (blocks of the group - 1) x one block, for each group

A block that is left out is replaced by one that returns its first argument, so this holds for
blocks that keep the shape of what they get. All other models are measured as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.engine.parallel.dividing.stages import Absent
from hpctrain.engine.parallel.preparing.blocks import find_blocks

_Measured = tuple[int, ...]
_FEWEST = 4  # with fewer blocks, measuring all of them is as fast
_NUMBERS = ("idx", "index", "number")  # the place of a layer, which does not change what it does


def measured_by_block(model: nn.Module, measure: Callable[[], _Measured]) -> _Measured:
    """Return what `measure` finds for the whole model, which is as before afterwards.

    `measure` runs the model, and returns numbers to which each block adds its share.
    """
    groups = [names for names in alike(model) if len(names) >= _FEWEST]
    if not groups:
        return measure()
    kept: list[bool] = []
    with _omitted(model, [name for names in groups for name in names[1:]]):
        handles = [_watch(model.get_submodule(names[0]), kept) for names in groups]
        try:
            base = measure()
        finally:
            for handle in handles:
                handle.remove()
    if not kept or not all(kept):
        return measure()
    whole = base
    for names in groups:
        others = [n for each in groups for n in (each[1:] if each is not names else each[2:])]
        with _omitted(model, others):
            more = measure()
        whole = tuple(
            total + (len(names) - 1) * (two - one)
            for total, one, two in zip(whole, base, more, strict=True)
        )
    return whole


def alike(model: nn.Module) -> list[list[str]]:
    """Return the names of the blocks, in groups of one class, shapes, and attributes."""
    try:
        blocks = find_blocks(model, [])
    except Exception:  # a model without blocks
        return []
    groups: dict[Any, list[str]] = {}
    for name, block in blocks:
        groups.setdefault(_kind(block), []).append(name)
    return list(groups.values())


def _kind(block: nn.Module) -> Any:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in tensors)
    attributes = tuple(
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (int, float, str)) and not key.endswith(_NUMBERS)
    )
    classes = tuple((name, type(module)) for name, module in block.named_modules())
    again = "forward" in vars(block)  # activation checkpointing may be of every other block
    return classes, shapes, attributes, again


def _watch(block: nn.Module, kept: list[bool]) -> Any:
    """Note whether a block returns what its first argument looks like."""

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        if isinstance(first, torch.Tensor) and isinstance(output, torch.Tensor):
            kept.append(first.shape == output.shape and first.dtype == output.dtype)
        else:
            kept.append(False)

    return block.register_forward_hook(look, with_kwargs=True)


@contextmanager
def _omitted(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    blocks = {name: model.get_submodule(name) for name in names}
    try:
        for name in names:
            model.set_submodule(name, Absent())
        yield
    finally:
        for name, block in blocks.items():
            model.set_submodule(name, block)
