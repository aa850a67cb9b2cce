"""What a checkpoint has beside models and optimizers, and the bytes of its tensors."""

from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch

from hpctrain.data import generators
from hpctrain.engine.distributed.tensors import local


class Tensors(Protocol):
    """More tensors that a rank saves and loads, beside models and optimizers.

    Attributes:
        tensors: What this rank saves, by `RANK.NAME`.
        loaded: What this rank has loaded, by NAME.
    """

    tensors: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]

    def of_rank(self, names: Collection[str], saved: int) -> dict[str, str]:
        """Return what this rank loads of these names, which `saved` ranks have saved, by NAME."""


def random_states(rank: int) -> dict[str, torch.Tensor]:
    """Return the states of the random generators of a rank, as they are saved."""
    return {f"random.{name}.{rank}": each for name, each in generators.states().items()}


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of what this rank has of tensors."""
    return sum(local(each).nbytes for each in values if isinstance(each, torch.Tensor))
