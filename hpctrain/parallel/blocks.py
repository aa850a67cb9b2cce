"""The blocks of a model: the layers that are alike, such as the layers of a transformer.

Sharding gathers, activation checkpointing recomputes and torch.compile translates block by block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hpctrain.errors import ConfigError


def find_blocks(model: nn.Module, classes: list[str]) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the blocks, in the order of the model.

    Without class names these are the members of the longest list (`nn.ModuleList`,
    `nn.ModuleDict` or `nn.Sequential`) whose members with parameters, at least two, have one class.
    Lists of the same class of members, such as the stages of a ResNet, are taken together. Members
    that are lists themselves, such as [attention, feed-forward], are never called: their parts are.

    Args:
        model: The model.
        classes: Class names of blocks, from `parallel.blocks`.

    Raises:
        ConfigError: A class name does not occur, a block is within another, or no list is found.
    """
    if classes:
        return _named(model, classes)
    lists: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        members = [(key, m) for key, m in module.named_children() if _size(m)]
        kinds = {type(member) for _, member in members}
        if len(kinds) == 1:
            prefix = f"{name}." if name else ""
            lists.setdefault(kinds.pop(), []).extend((prefix + key, m) for key, m in members)
    # Layers within layers, such as the experts of each block, are not blocks by themselves.
    found = [_outermost(blocks) for blocks in lists.values() if len(blocks) > 1]
    if not found:
        raise ConfigError(
            f"the blocks of {type(model).__name__} cannot be found: it has no list (nn.ModuleList, "
            "nn.ModuleDict or nn.Sequential) of two or more modules with parameters and of one "
            f"class. Name the classes of its blocks: parallel.blocks=[{_classes(model)[0]}]; it "
            f"has {', '.join(_classes(model))}"
        )
    return [
        part
        for name, block in max(found, key=lambda blocks: sum(_size(block) for _, block in blocks))
        for part in _called(name, block)
    ]


def _named(model: nn.Module, classes: list[str]) -> list[tuple[str, nn.Module]]:
    blocks = [(name, m) for name, m in model.named_modules() if type(m).__name__ in classes]
    names = {type(module).__name__ for _, module in blocks}
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
    found = {type(m).__name__: None for name, m in model.named_modules() if name and _size(m)}
    return list(found) or ["CLASS"]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
