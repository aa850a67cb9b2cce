"""Transforms of whole batches, on the device of the batch: no loop over samples.

    transform: Compose of RandomCrop(32, padding=4), RandomFlip(), Normalise()
    batch = bind(transform, index.statistics["train"])(batch, draws)

A transform is a callable (batch, draws) -> batch. It never writes into its input tensors, which may
be the loader's buffers, and it leaves other fields as they are. Random transforms take their
choices from `draws` (`hpctrain.data.draws`), so that a choice depends on the sample and the epoch,
not on ranks or devices. Fields that are named together, such as an image and its mask, get the same
choice. Images are (b, channels, height, width), of any dtype.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hpctrain.base.errors import DataError
from hpctrain.data.crops import CenterCrop, RandomCrop, RandomFlip
from hpctrain.data.draws import Draws
from hpctrain.data.normalise import Cast, Normalise
from hpctrain.data.shards.index import Statistics
from hpctrain.data.shards.types import Batch
from hpctrain.data.workers import samples

__all__ = [
    "Cast",
    "CenterCrop",
    "Compose",
    "Normalise",
    "RandomCrop",
    "RandomFlip",
    "Transform",
    "WatchedBatches",
    "bind",
]


class Transform(Protocol):
    """The interface of a batch transform; see the module.

    A random transform has an attribute `random = True`: an evaluation leaves it out. `random =
    False` says that it never draws. Any other is tried (`hpctrain.data.randomness`).
    """

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Return the batch with the fields of this transform replaced."""


def bind(transform: Transform, statistics: Mapping[str, Statistics]) -> Transform:
    """Return `transform` with the statistics of the training split, if it has a method `bind`."""
    method = getattr(transform, "bind", None)
    return transform if method is None else method(statistics)


class WatchedBatches(samples.Watched):
    """The same for a transform of batches, such as `data.batch_transforms[0]`."""

    def __call__(self, batch: Batch, draws: Draws) -> Any:
        """Return what the transform returns; a ConfigError if it has drawn random numbers."""
        before = draws.drawn
        result = self._transform(batch, draws)
        self._check(draws.drawn != before, "batch")
        return result

    def bind(self, statistics: Mapping[str, Statistics]) -> "WatchedBatches":
        """See `bind`."""
        return WatchedBatches(bind(self._transform, statistics), self._key)


class Compose:
    """Applies transforms one after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = list(transforms)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        for transform in self.transforms:
            result: Any = transform(batch, draws)
            if not isinstance(result, dict) or not batch.keys() & {"mask"} <= result.keys():
                raise DataError(
                    f"the batch transform {transform} returned "
                    f"{', '.join(result) if isinstance(result, dict) else type(result).__name__}; "
                    "it must return the batch as a dict, with its mask"
                )
            batch = result
        return batch

    def bind(self, statistics: Mapping[str, Statistics]) -> "Compose":
        """See `bind`."""
        return Compose([bind(transform, statistics) for transform in self.transforms])
