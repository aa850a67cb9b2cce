"""The blocks of a model: the layers that are alike.

Sharding gathers, activation checkpointing recomputes and torch.compile translates block by block.
"""

from collections.abc import Iterator

from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.engine.layers.lora import plain_class

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
        named = [(f"{name}.{key}".removeprefix("."), m) for key, m in members]
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
