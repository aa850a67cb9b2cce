"""The summary of a model: its layers, and the number and the size of their parameters.

    model Transformer: 8,030,261,248 parameters, 15,316.51 MiB in bfloat16
      layer     class      shape               parameters        MiB
      embed     Embedding  128256 x 4096      525,336,576   1,002.00
      layers.*  Block                    32 x 218,112,000  13,312.50
      norm      RMSNorm    4096                     4,096       0.01
      head      Linear     128256 x 4096      525,336,576   1,002.00

Lists of layers are opened, and so is what holds the blocks of the model. Layers that look the same
are one line, with `*` for their numbers. Only names, shapes and dtypes are read: a model without
memory (on the meta device) has the same summary, and nothing is computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hpctrain.base.units import MIB
from hpctrain.engine.distributed.tensors import dtype_name
from hpctrain.engine.layers.lora import plain_class
from hpctrain.engine.parallel.preparing.blocks import find_blocks, path_of
from hpctrain.errors import ConfigError

_MOST = 40  # lines
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a dotted name


@dataclass(frozen=True)
class _Line:
    """A layer, or `count` that look the same."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int
    count: int = 1

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of the line in a table."""
        each = f"{self.count} x " if self.count > 1 else ""
        size = f"{each}{self.parameters:,}" if self.parameters else "shared"
        shape = " x ".join(map(str, self.shape))
        return self.name, self.kind, shape, size, _mib(self.count * self.bytes)


@dataclass(frozen=True)
class ModelSummary:
    """What a model consists of.

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
    def of(cls, model: nn.Module, blocks: Sequence[str] = ()) -> ModelSummary:
        """Return the summary of a whole model, whose blocks may have these class names."""
        own = list(model.parameters())
        return cls(
            kind=type(model).__name__,
            parameters=sum(p.numel() for p in own),
            trained=sum(p.numel() for p in own if p.requires_grad),
            bytes=sum(p.nbytes for p in own),
            buffer_bytes=sum(b.nbytes for b in model.buffers()),
            dtypes=tuple(sorted({dtype_name(p.dtype) for p in own})),
            lines=tuple(_lines(model, list(blocks))),
        )

    def __str__(self) -> str:
        frozen = self.parameters - self.trained
        size = f"{_mib(self.bytes)} MiB in {', '.join(self.dtypes)}"
        lines = [f"model {self.kind}: {self.parameters:,} parameters, {size}"]
        if frozen:
            lines.append(f"  {self.trained:,} are trained, {frozen:,} are frozen")
        if self.buffer_bytes >= MIB / 100:
            lines.append(f"  its buffers have {_mib(self.buffer_bytes)} MiB")
        titles = ("layer", "class", "shape", "parameters", "MiB")
        rows = [titles, *(line.cells for line in self.lines[:_MOST])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        form = "  {{:{}}}  {{:{}}}  {{:{}}}  {{:>{}}}  {{:>{}}}".format(*widths)
        lines += [form.format(*row) for row in rows]
        if len(self.lines) > _MOST:
            lines.append(f"  and {len(self.lines) - _MOST} more")
        return "\n".join(lines)


def _lines(model: nn.Module, classes: list[str]) -> list[_Line]:
    """Return the lines of a model; a parameter counts for the first layer that has it."""
    try:
        blocks = {name for name, _ in find_blocks(model, classes)}
    except ConfigError:  # a model without blocks
        blocks = set()
    around = {name[: dot.start()] for name in blocks for dot in re.finditer(r"\.", name)}
    counted = set[int]()
    alike: dict[tuple[object, ...], list[_Line]] = {}

    def add(name: str, kind: str, every: list[nn.Parameter], direct: list[nn.Parameter]) -> None:
        is_leaf = len(direct) == len(every)
        shape = tuple(max(direct, key=torch.Tensor.numel).shape) if is_leaf else ()
        new = [parameter for parameter in every if id(parameter) not in counted]
        counted.update(map(id, new))
        sizes = sum(p.numel() for p in new), sum(p.nbytes for p in new)
        look = _NUMBER.sub("*", name), kind, shape, *sizes
        alike.setdefault(look, []).append(_Line(name, kind, shape, *sizes))

    def visit(module: nn.Module, name: str) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            add(path_of(name, key), "Parameter", [parameter], [parameter])
        for key, child in module.named_children():
            path, every = path_of(name, key), list(child.parameters())
            if path in around or (isinstance(child, _LISTS) and path not in blocks):
                visit(child, path)
            elif every:
                direct = list(child.parameters(recurse=False))
                add(path, plain_class(child).__name__, every, direct)

    visit(model, "")
    return [
        one[0] if len(one) == 1 else replace(one[0], name=str(look[0]), count=len(one))
        for look, one in alike.items()
    ]


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"
