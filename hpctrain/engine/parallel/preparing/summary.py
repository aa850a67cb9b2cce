"""What a model consists of, as a table of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hpctrain.base.units import MIB
from hpctrain.engine.layers.lora import plain_class

_MOST = 40  # lines
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted name
_TITLES = ("layer", "class", "shape", "parameters", "MiB")
_Layer = tuple[str, str, tuple[int, ...], list[nn.Parameter]]


class _Line(NamedTuple):
    """`number` layers that look the same, each with so many parameters."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int
    number: int

    def cells(self) -> tuple[str, ...]:
        each = f"{self.number} x " if self.number > 1 else ""
        size = f"{each}{self.parameters:,}" if self.parameters else "shared"
        shape = " x ".join(map(str, self.shape))
        return self.name, self.kind, shape, size, f"{self.number * self.bytes / MIB:,.2f}"


@dataclass(frozen=True)
class ModelSummary:
    """What a model consists of.

    model Transformer: 8,030,261,248 parameters, 15,316.51 MiB in bfloat16
      layer     class      shape               parameters        MiB
      embed     Embedding  128256 x 4096      525,336,576   1,002.00
      layers.*  Block                    32 x 218,112,000  13,312.50
      norm      RMSNorm    4096                     4,096       0.01
      head      Linear     128256 x 4096      525,336,576   1,002.00

    Lists of layers are opened, and so is what has more than half of all parameters and is not in a
    list. Layers that look the same are one line, with `*` for their numbers. Only names, shapes and
    dtypes are read: a model without memory (on the meta device) has the same summary, and nothing
    is computed.

    `parameters` and `trained` are numbers of elements, each counted once; `bytes` is the size of
    the parameters, `buffer_bytes` that of buffers. `lines` is the table of layers.
    """

    kind: str
    parameters: int
    trained: int
    bytes: int
    buffer_bytes: int
    dtypes: tuple[str, ...]
    lines: tuple[_Line, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelSummary:
        """Return the summary of a whole model."""
        own = list(model.parameters())
        size = sum(p.numel() for p in own)
        return cls(
            kind=type(model).__name__,
            parameters=size,
            trained=sum(p.numel() for p in own if p.requires_grad),
            bytes=sum(p.nbytes for p in own),
            buffer_bytes=sum(b.nbytes for b in model.buffers()),
            dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in own})),
            lines=_lines(model, size),
        )

    def __str__(self) -> str:
        frozen = self.parameters - self.trained
        size = f"{self.bytes / MIB:,.2f} MiB in {', '.join(self.dtypes)}"
        lines = [f"model {self.kind}: {self.parameters:,} parameters, {size}"]
        if frozen:
            lines.append(f"  {self.trained:,} are trained, {frozen:,} are frozen")
        if self.buffer_bytes >= MIB / 100:
            lines.append(f"  its buffers have {self.buffer_bytes / MIB:,.2f} MiB")
        rows = [_TITLES, *(line.cells() for line in self.lines[:_MOST])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  {{:{}}}  {{:{}}}  {{:{}}}  {{:>{}}}  {{:>{}}}".format(*widths)
        lines += [form.format(*row) for row in rows]
        if len(self.lines) > _MOST:
            lines.append(f"  and {len(self.lines) - _MOST} more")
        return "\n".join(lines)


def _lines(model: nn.Module, size: int) -> tuple[_Line, ...]:
    """Return the lines of a model; a parameter counts for the first layer that has it."""
    counted = set[int]()
    alike: dict[tuple[str, str, tuple[int, ...], int, int], list[str]] = {}
    for name, kind, shape, every in _layers(model, size):
        new = [p for p in every if id(p) not in counted]
        counted.update(map(id, new))
        sizes = sum(p.numel() for p in new), sum(p.nbytes for p in new)
        alike.setdefault((_NUMBER.sub("*", name), kind, shape, *sizes), []).append(name)
    return tuple(
        _Line(names[0] if len(names) == 1 else look[0], *look[1:], len(names))
        for look, names in alike.items()
    )


def _layers(module: nn.Module, size: int, start: str = "") -> Iterator[_Layer]:
    """Yield the name, the class, the shape and the parameters of each layer of a model."""
    for key, parameter in module.named_parameters(recurse=False):
        yield start + key, "Parameter", tuple(parameter.shape), [parameter]
    opens = not (start and isinstance(module, _LISTS))
    for key, child in module.named_children():
        every, holds = list(child.parameters()), any(True for _ in child.children())
        large = opens and holds and 2 * sum(p.numel() for p in every) > size
        if isinstance(child, _LISTS) or large:
            yield from _layers(child, size, f"{start}{key}.")
        elif every:
            shape = () if holds else tuple(max(every, key=torch.Tensor.numel).shape)
            yield start + key, plain_class(child).__name__, shape, every
