"""A template of configs that differ in plain values only, such as those of `seed=range(0,1000)`.

    first run:   Hydra ── tree with all types ── typed Config       6 ms
    each other:  seed=7 ── the type in the tree converts it ── a copy of that Config with 7   0.1 ms

A plain value is a number, a truth value or a text without `${`, for a key that has such a value. It
cannot change which keys there are. The interpolations of other keys are resolved anew for each run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

from omegaconf import (
    AnyNode,
    BooleanNode,
    Container,
    DictConfig,
    FloatNode,
    IntegerNode,
    ListConfig,
    Node,
    OmegaConf,
    StringNode,
    ValueNode,
)

from hpctrain.config.frozen import typed, with_absolute_paths
from hpctrain.config.schema import Config

T = TypeVar("T")
_LEAVES = (AnyNode, BooleanNode, FloatNode, IntegerNode, StringNode)


class Template:
    """A composed config of which some plain values are given anew for each run; it changes `tree`.

    A key that has no plain value is a LookupError.
    """

    def __init__(self, tree: DictConfig, names: Sequence[str]) -> None:
        self._leaves = {name: _leaf(tree, name) for name in names}
        self._resolved = list(_interpolated(tree, ()))
        self._config = typed(tree)
        for path, _, _ in self._resolved:
            if is_dataclass(_get(self._config, path)):
                raise LookupError(f"{path}: a whole section is an interpolation")

    def config(self, values: Mapping[str, Any]) -> Config:
        """Return the typed config with these values; OmegaConf raises if one does not fit."""
        config = _copy(self._config)
        for name, value in values.items():
            leaf = self._leaves[name]
            leaf._set_value(value)  # converts it, or refuses it
            _put(config, name.split("."), leaf._value())
        for path, parent, key in self._resolved:
            value = parent[key]
            if isinstance(value, Container):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
            _put(config, path, value)
        return with_absolute_paths(config)


def _leaf(tree: DictConfig, name: str) -> ValueNode:
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
            raise LookupError(name)
        node = node._get_node(part, validate_access=False)
    if type(node) not in _LEAVES or node._is_interpolation():
        raise LookupError(name)
    leaf: ValueNode = node
    return leaf


def _interpolated(
    node: Node, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Yield every interpolation inside a container: its path, its container and its key there."""
    keys: Any = []
    if isinstance(node, DictConfig):
        keys = node.keys()
    elif isinstance(node, ListConfig) and not (node._is_none() or node._is_missing()):
        keys = range(len(node))
    for key in keys:
        child: Any = node._get_node(key)  # type: ignore[attr-defined]
        if child._is_interpolation():
            yield (*path, key), node, key
        else:
            yield from _interpolated(child, (*path, key))


def _get(config: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        config = getattr(config, str(part)) if is_dataclass(config) else config[part]
    return config


def _put(config: Config, path: Sequence[str | int], value: Any) -> None:
    holder = _get(config, path[:-1])
    if is_dataclass(holder):
        setattr(holder, str(path[-1]), value)
    else:
        holder[path[-1]] = value


def _copy(node: T) -> T:
    """Return a copy of sections, dicts and lists; `copy.deepcopy` takes 20 times as long."""
    made: Any = node
    if isinstance(node, dict):
        made = {key: _copy(value) for key, value in node.items()}
    elif isinstance(node, list):
        made = [_copy(value) for value in node]
    elif is_dataclass(node):
        made = object.__new__(type(node))
        for name, value in vars(node).items():
            made.__dict__[name] = value if isinstance(value, _SCALARS) else _copy(value)
    return made  # type: ignore[no-any-return]


_SCALARS = (str, int, float, type(None))
