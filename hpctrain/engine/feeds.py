"""What gives the batches of a training, and the feeds of a loop of one's own."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.foreign import ForeignBatches, undivided
from hpctrain.engine.distributed import objects

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Given:
    """As a step of our own loader, of which the meter asks for the number of samples."""

    batch_size: int = 1

    @property
    def group(self) -> _Given:
        return self


class OwnFeed:
    """A feed of anything that can be iterated, or without data, one None for each step.

    Its samples are not known, so a batch counts as one sample. What the position in the data needs
    is kept by `Kept`; here is only the number of batches.
    """

    def __init__(self, data: Any, ranks: int) -> None:
        self.batches = None if data is None else ForeignBatches(data)
        self._ranks, self._consumed, self.wait_s = ranks, 0, 0.0
        self.last: Any = _Given()

    @property
    def epoch(self) -> int:
        """The number of whole passes over the data."""
        return 0 if self.batches is None else self.batches.epoch

    def __iter__(self) -> Iterator[Any]:
        source: Iterable[Any] = itertools.repeat(None) if self.batches is None else self.batches
        batches = iter(source)
        while True:
            began = time.monotonic()
            batch = next(batches, self)
            self.wait_s += time.monotonic() - began
            if batch is self:
                return
            if self._consumed == 0 and self.batches is not None and self._ranks > 1:
                said = undivided(batch, objects.all_gather)
                if said and dist.get_rank() == 0:
                    log.warning("session.steps: %s", said)
            self._consumed += 1
            yield batch

    def samples(self, step: Any = None) -> Sequence[tuple[str, int]]:
        """Return nothing: only the loop knows what its batches are."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that the loop was given."""
        return {"consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._consumed = state.get("consumed", 0)

    def close(self) -> None:
        """Let go of the data."""
        if self.batches is not None:
            self.batches.close()


# What gives the batches of a training, and keeps its position in them.
Feed = DevicePrefetcher | OwnFeed


class Pass:
    """The samples of a split, each once, in order; every `for` begins anew."""

    def __init__(self, feed: DevicePrefetcher) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[Any]:
        self._feed.load_state_dict({"consumed": 0})
        return iter(self._feed)

    def __len__(self) -> int:
        return self._feed.steps_per_epoch

    def close(self) -> None:
        """End worker processes, and release staged shards."""
        self._feed.close()
