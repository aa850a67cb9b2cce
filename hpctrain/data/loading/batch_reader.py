"""The reading of the batches of a group of steps at once."""

import time
from collections import deque
from collections.abc import Mapping

from hpctrain.data.buffers import Buffers
from hpctrain.data.loading.collate import Collate
from hpctrain.data.loading.reading_plan import StepGroup
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Batch
from hpctrain.data.source import Source
from hpctrain.data.workers.pool import Workers

MAX_STEPS = 64  # of a group


class BatchReader:
    """Reads groups; `batch_bytes` is that of the largest batch so far, where lengths vary."""

    def __init__(
        self,
        source: Source,
        share: int,
        collate: Collate,
        buffers: Buffers,
        *,
        workers: Workers | None,
        seed: int,
    ) -> None:
        self._source, self._share, self._collate = source, share, collate
        self._buffers, self._workers, self._seed = buffers, workers, seed
        self._fixed = {name: f for name, f in source.fields.items() if not f.variable}
        self._varies = len(self._fixed) < len(source.fields)
        self.batch_bytes = share * sum(field.nbytes for field in self._fixed.values())
        self.batch_s: float | None = None

    def steps_in(self, nbytes: int, seconds: float) -> int:
        """Return how many steps make about `nbytes`, and take at most `seconds`: 1 to MAX_STEPS."""
        if self.batch_s is None:
            return 1
        most = min(nbytes // max(1, self.batch_bytes), int(seconds / max(1e-9, self.batch_s)))
        return min(MAX_STEPS, max(1, most))

    def read(self, group: StepGroup) -> deque[Batch]:
        """Return one batch for each step of the group."""
        began = time.monotonic()
        positions, samples, mask = group.plan
        rows: Mapping[str, Array | Ragged]
        if self._workers is not None:
            seed = (self._seed, group.epoch)
            rows = self._workers.submit(seed, positions.reshape(-1), samples.reshape(-1)).result()
        else:
            rows = self._source.read(samples.reshape(-1), self._room(samples.size))
        batches = self._collate(rows, mask)
        if self._varies:
            nbytes = max(sum(value.nbytes for value in batch.values()) for batch in batches)
            self.batch_bytes = max(self.batch_bytes, nbytes)
        self.batch_s = (time.monotonic() - began) / len(batches)
        return batches

    def _room(self, count: int) -> dict[str, Array]:
        """Return arrays for the fixed-size fields of `count` samples."""
        return {
            name: self._buffers.take((count, *field.shape), field.dtype)
            for name, field in self._fixed.items()
        }
