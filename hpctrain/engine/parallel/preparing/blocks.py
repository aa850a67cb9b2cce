"""The blocks of a model: the layers that are alike, and the summary of all of them.

Sharding gathers, activation checkpointing recomputes and torch.compile translates block by block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hpctrain.base.units import MIB
from hpctrain.engine.distributed.tensors import dtype_name
from hpctrain.engine.layers.lora import plain_class
from hpctrain.errors import ConfigError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # containers compute nothing


def find_blocks(model: nn.Module, classes: list[str]) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the blocks, in the order of the model.

    Without class names (`parallel.blocks`) these are the members of the longest list
    (`nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`) whose members with parameters, at least
    two, have one class. Lists of the same class of members, such as the stages of a ResNet, are
    taken together. A list of layers of several classes is taken if all that was found is within
    them: nothing, linear layers, or the experts of some layers that are beside dense ones. Members
    that are lists themselves, such as [attention, feed-forward], are never called: their parts are.
    """
    if classes:
        return _named(model, classes)
    lists: dict[type, list[tuple[str, nn.Module]]] = {}
    mixed: list[list[tuple[str, nn.Module]]] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        members = [(key, m) for key, m in module.named_children() if _size(m)]
        kinds = {plain_class(member) for _, member in members}
        named = [(path_of(name, key), m) for key, m in members]
        if len(kinds) == 1:
            lists.setdefault(kinds.pop(), []).extend(named)
        elif len(members) > 1 and all(any(True for _ in m.children()) for _, m in members):
            mixed.append(named)
    # Layers within layers, such as the experts of each block, are not blocks by themselves.
    found = [_outermost(blocks) for blocks in lists.values() if len(blocks) > 1]
    longest = max(found, key=_sum, default=[])
    around = [blocks for blocks in mixed if _contains(blocks, longest)]
    if not longest and not around:
        raise ConfigError(
            f"the blocks of {type(model).__name__} cannot be found: it has no list (nn.ModuleList, "
            "nn.ModuleDict or nn.Sequential) of two or more modules with parameters and of one "
            "class. Name the classes of its blocks (parallel.blocks); it has "
            f"{', '.join(_classes(model)) or 'none'}"
        )
    chosen = max(around, key=_sum, default=longest)
    return [part for name, block in chosen for part in _called(name, block)]


def _contains(blocks: list[tuple[str, nn.Module]], found: list[tuple[str, nn.Module]]) -> bool:
    """Return whether layers of several classes are the blocks, and not what was found in them."""
    holders = [{b for b, _ in blocks if name.startswith(f"{b}.")} for name, _ in found]
    # A class that comes again is that of a layer. An encoder with layers and a head are no blocks.
    repeated = len({plain_class(block) for _, block in blocks}) < len(blocks)
    some = len(set().union(*holders)) < len(blocks)
    single = all(not any(True for _ in module.children()) for _, module in found)
    return all(holders) and (single or (some and repeated))


def _named(model: nn.Module, classes: list[str]) -> list[tuple[str, nn.Module]]:
    blocks = [(name, m) for name, m in model.named_modules() if plain_class(m).__name__ in classes]
    names = {plain_class(module).__name__ for _, module in blocks}
    if missing := [name for name in classes if name not in names]:
        raise ConfigError(
            f"parallel.blocks: {type(model).__name__} has no module of class {missing[0]}; it has "
            f"{', '.join(_classes(model))}"
        )
    if len(_outermost(blocks)) < len(blocks):
        raise ConfigError(f"parallel.blocks={classes}: some of these modules are within others")
    return blocks


def _called(name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a block, or those parts of a list that are called and have more than vectors."""
    if not isinstance(block, (nn.ModuleList, nn.ModuleDict)):
        yield name, block
        return
    for key, part in block.named_children():
        if any(parameter.ndim > 1 for parameter in part.parameters()):
            yield from _called(f"{name}.{key}", part)


def _outermost(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = {name for name, _ in blocks}

    def within(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:end]) in names for end in range(1, len(parts)))

    return [(name, module) for name, module in blocks if not within(name)]


def _classes(model: nn.Module) -> list[str]:
    """Return the class names of the modules that have parameters below them, without the model."""
    found = [m for name, m in model.named_modules() if name and _size(m)]
    return [
        *dict.fromkeys(plain_class(m).__name__ for m in found if not isinstance(m, _CONTAINERS))
    ]


def _sum(blocks: list[tuple[str, nn.Module]]) -> int:
    return sum(_size(block) for _, block in blocks)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def path_of(name: str, key: str) -> str:
    """Return the name in the whole model of what a module of this name has under a key."""
    return f"{name}.{key}" if name else key


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

    model Transformer: 8,030,261,248 parameters, 15,316.51 MiB in bfloat16
      layer     class      shape               parameters        MiB
      embed     Embedding  128256 x 4096      525,336,576   1,002.00
      layers.*  Block                    32 x 218,112,000  13,312.50
      norm      RMSNorm    4096                     4,096       0.01
      head      Linear     128256 x 4096      525,336,576   1,002.00

    Lists of layers are opened, and so is what holds the blocks of the model. Layers that look the
    same are one line, with `*` for their numbers. Only names, shapes and dtypes are read: a model
    without memory (on the meta device) has the same summary, and nothing is computed.

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
