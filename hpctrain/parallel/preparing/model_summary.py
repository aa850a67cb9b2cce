"""The summary of a model: its layers, and the number and the size of their parameters.

    model Transformer: 8,030,261,248 parameters, 15,316.51 MiB in bfloat16
      layer        class      shape          parameters        MiB
      embedding    Embedding  128256 x 4096     525.3 M   1,002.00
      layers.0-31  Block                   32 x 218.1 M  13,312.50
      norm         RMSNorm    4096                4,096       0.01
      head         Linear     128256 x 4096     525.3 M   1,002.00

Lists of layers are opened, and so is what holds the blocks of the model. Members of a list that
look the same are one line. Only names, shapes and dtypes are read: a model without memory (on the
meta device) has the same summary, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hpctrain.distributed.tensors import dtype_name
from hpctrain.errors import ConfigError
from hpctrain.models.lora import plain_class
from hpctrain.parallel.preparing.blocks import find_blocks, path_of
from hpctrain.units import MIB

_MOST = 40  # lines
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class _Line:
    """A layer, or some that look the same."""

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    count: int = 1
    parameters: int = 0
    bytes: int = 0


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
            lines=tuple(_Counter(*_holders(model, list(blocks))).lines(model, "")),
        )

    def __str__(self) -> str:
        frozen = self.parameters - self.trained
        size = f"{_mib(self.bytes)} MiB in {', '.join(self.dtypes)}"
        lines = [f"model {self.kind}: {self.parameters:,} parameters, {size}"]
        if frozen:
            lines.append(f"  {self.trained:,} are trained, {frozen:,} are frozen")
        if self.buffer_bytes >= MIB / 100:
            lines.append(f"  its buffers have {_mib(self.buffer_bytes)} MiB")
        return "\n".join((*lines, *_table(self.lines)))


class _Counter:
    """Counts each parameter for the first layer that has it; `blocks` and what is `around` them."""

    def __init__(self, blocks: set[str], around: set[str]) -> None:
        self._blocks, self._around, self._counted = blocks, around, set[int]()

    def lines(self, module: nn.Module, name: str) -> Iterator[_Line]:
        """Yield the lines of what a module holds."""
        own = list(module.named_parameters(recurse=False))
        for key, parameter in own:
            yield self._line(path_of(name, key), "Parameter", [parameter], [parameter])
        children = [(k, m) for k, m in module.named_children() if any(True for _ in m.parameters())]
        alone = len(children) == 1 and not own
        found: list[tuple[str, list[_Line]]] = []
        for key, child in children:
            path = path_of(name, key)
            opened = isinstance(child, _LISTS) or path in self._around
            opened |= alone and any(True for _ in child.children())
            if opened and path not in self._blocks:
                found.append((key, list(self.lines(child, path))))
            else:
                every, direct = list(child.parameters()), list(child.parameters(recurse=False))
                found.append((key, [self._line(path, plain_class(child).__name__, every, direct)]))
        if isinstance(module, _LISTS):
            yield from _folded(name, found)
        else:
            yield from (line for _, lines in found for line in lines)

    def _line(
        self, name: str, kind: str, every: Sequence[nn.Parameter], direct: Sequence[nn.Parameter]
    ) -> _Line:
        """Return the line of a layer; a parameter that it has `direct` gives its shape."""
        is_leaf = len(direct) == len(every)
        shape = tuple(max(direct, key=torch.Tensor.numel).shape) if is_leaf else ()
        new = [parameter for parameter in every if id(parameter) not in self._counted]
        self._counted |= {*map(id, new)}
        count = sum(parameter.numel() for parameter in new)
        return _Line(name, kind, shape, 1, count, sum(p.nbytes for p in new))


def _holders(model: nn.Module, classes: list[str]) -> tuple[set[str], set[str]]:
    """Return the names of the blocks, and of all modules that hold some of them."""
    try:
        blocks = {name for name, _ in find_blocks(model, classes)}
    except ConfigError:  # a model without blocks
        return set(), set()
    parts = [name.split(".") for name in blocks]
    return blocks, {".".join(part[:end]) for part in parts for end in range(1, len(part))}


def _folded(name: str, members: Sequence[tuple[str, list[_Line]]]) -> Iterator[_Line]:
    """Yield the lines of the members of a list; members with the same lines are put together."""
    alike: dict[tuple[_Line, ...], list[str]] = {}
    for key, lines in members:
        start = len(path_of(name, key))
        look = tuple(replace(line, name=line.name[start:]) for line in lines)
        alike.setdefault(look, []).append(key)
    for look, keys in alike.items():
        path = path_of(name, _together(keys))
        for line in look:
            yield replace(line, name=path + line.name, count=line.count * len(keys))


def _together(keys: Sequence[str]) -> str:
    """Return the names of members of a list as one: `0-31`, or `0,2,...,62`."""
    numbers = [*map(int, keys)] if all(key.isdecimal() for key in keys) else []
    if len(keys) > 1 and numbers and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{keys[0]}-{keys[-1]}"
    return ",".join(keys if len(keys) <= 3 else (*keys[:2], "...", keys[-1]))


def _table(lines: Sequence[_Line]) -> list[str]:
    rows = [("layer", "class", "shape", "parameters", "MiB"), *map(_cells, lines[:_MOST])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if n < 3 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return [f"  {line}".rstrip() for line in (*text, *more)]


def _cells(line: _Line) -> tuple[str, ...]:
    each = f"{line.count} x " if line.count > 1 else ""
    size = f"{each}{_count(line.parameters)}" if line.parameters else "shared"
    shape = " x ".join(map(str, line.shape))
    return line.name, line.kind, shape, size, _mib(line.count * line.bytes)


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"
