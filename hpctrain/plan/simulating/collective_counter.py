"""Counts the collective operations of a step, by the dimensions of the mesh that they cross.

rank = (((pp x dp_replicate + r) x dp_shard + s) x cp + c) x tp + t        as hpctrain.parallel.mesh
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpctrain.config.rules.degrees import Degrees

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # the outermost first
# They are in the names of torch's operators, with or without underscores. The first counts.
_KINDS = ("reduce-scatter", "all-gather", "all-reduce", "all-to-all", "broadcast", "send")
_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass
class Traffic:
    """The operations of one kind over one group of ranks."""

    kind: str  # such as all-gather
    dimensions: str  # the degrees that the group crosses, such as dp_shard, joined by x
    ranks: int
    calls: int = 0
    # The sum of the messages; for a gather or scatter that of the whole, not of a rank's part.
    nbytes: int = 0


class CollectiveCounter(TorchDispatchMode):
    """Counts while it is entered, by the degrees of the mesh."""

    def __init__(self, degrees: Degrees) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._degrees = degrees
        self._found: dict[tuple[str, tuple[int, ...]], Traffic] = {}

    @property
    def traffic(self) -> list[Traffic]:
        """What was counted, most bytes first."""
        return sorted(self._found.values(), key=lambda each: -each.nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count it if it is one of a process group."""
        found = func(*args, **(kwargs or {}))
        if func.namespace in _SPACES:
            self._count(str(func), (args, kwargs, found))
        return found

    def _count(self, name: str, values: Any) -> None:
        bare, leaves = name.replace("_", ""), tree_leaves(values)
        kind = next((kind for kind in _KINDS if kind.replace("-", "") in bare), None)
        ranks = _ranks(leaves)
        if kind is None or ranks is None:
            return
        if (kind, ranks) not in self._found:
            crossed = dimensions(self._degrees, ranks)
            self._found[kind, ranks] = Traffic(kind, crossed, len(ranks))
        traffic = self._found[kind, ranks]
        traffic.calls += 1
        sizes = (t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor))
        traffic.nbytes += max(sizes, default=0)


def _ranks(leaves: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the ranks of the group among the arguments of an operation."""
    for leaf in leaves:
        group: Any = leaf
        # The operation of a reduction is a script object, too, and "sum" is no name of a group.
        with suppress(RuntimeError, TypeError, ValueError, KeyError):
            if isinstance(leaf, torch.ScriptObject):
                group = distributed.ProcessGroup.unbox(leaf)
            elif isinstance(leaf, str):
                group = _resolve_process_group(GroupName(leaf))
        if isinstance(group, distributed.ProcessGroup):
            return tuple(distributed.get_process_group_ranks(group))
    return None


def coordinates(degrees: Degrees, rank: int) -> dict[str, int]:
    """Return the place of a rank, by the names of the degrees."""
    found = {}
    for name in reversed(ORDER):
        rank, found[name] = divmod(rank, getattr(degrees, name))
    return dict(reversed(found.items()))


def dimensions(degrees: Degrees, ranks: Sequence[int]) -> str:
    """Return which degrees distinguish these ranks, such as `dp_shard` or `dp_shard x cp`."""
    places = [coordinates(degrees, rank) for rank in ranks]
    crossed = [name for name in ORDER if len({place[name] for place in places}) > 1]
    return " x ".join(crossed) or "one rank"
