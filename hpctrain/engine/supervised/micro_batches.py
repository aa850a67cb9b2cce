"""How many rows of its share a rank processes at a time.

    accumulate x rows = share        the gradient is the same for any size of the micro-batches

A larger micro-batch is faster and needs more memory. `train.micro_batch_size=auto` measures the
memory of three steps and takes the largest size that fits. When a rank runs out of memory later,
the next attempt takes the next smaller size (`hpctrain.engine.loop`).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Self

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.config.metric_registry import GLOBAL_BATCH_SIZE
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed import objects
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.steps.place import Place

log = logging.getLogger(__name__)

_USABLE = 0.9  # of the memory: the allocator cannot use all of it, and other steps differ a little


class GpuMemory:
    """The memory of the current GPU in bytes, as torch's allocator counts it."""

    def restart(self) -> None:
        """Begin to measure a peak."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Return the most that was allocated at a time since `restart`."""
        return float(torch.cuda.max_memory_allocated())

    def size(self) -> float:
        """Return what this process can allocate; of a shared GPU, at most its share."""
        free, whole = torch.cuda.mem_get_info()
        limit = torch.cuda.get_per_process_memory_fraction() * whole
        return float(min(free + torch.cuda.memory_reserved(), limit))


class MicroBatches(Part):
    """The number of micro-batches of a model, which may change between steps.

    `record` is called on every rank with new rows of a micro-batch. The largest size that fits in
    `memory` is looked for; None keeps the size. `limit` is the most rows that have been found to
    fit.
    """

    def __init__(
        self,
        model: ParallelModel,
        share: int,
        record: Callable[[int], None],
        memory: GpuMemory | None = None,
    ) -> None:
        self.model, self.share, self._record, self._memory = model, share, record, memory
        self.limit: int | None = None
        self._peaks: list[float] = []
        if memory is not None:
            model.accumulate = share

    @classmethod
    def of(cls, share: int, place: Place, model: ParallelModel) -> Self | None:
        """Return those of the config for a `share`, or of what an earlier attempt has found.

        None if the batch is one piece: its samples are packed, or a pipeline has their number.
        """
        if place.config.data.collate == "pack" or model.mesh.degrees.pp > 1:
            return None
        auto = place.config.train.micro_batch_size == "auto"
        if auto and model.precision.device.type != "cuda":
            raise ConfigError(
                "train.micro_batch_size=auto measures a GPU's memory: there is no GPU"
            )

        def record(rows: int) -> None:
            place.record(micro_batch_rows=rows)

        found = place.run.read().micro_batch_rows if place.ranks.is_main else None
        rows: int | None = objects.broadcast(found)
        fits = rows is not None and share % (rows * model.mesh.weight) == 0
        made = cls(model, share, record, GpuMemory() if auto and not fits else None)
        if rows is not None and fits and (auto or rows < made.rows):
            log.info("micro-batches of %d rows, as the attempt before has found", rows)
            model.accumulate = share // rows
        if not auto:
            made.limit = rows
        return made

    @property
    def rows(self) -> int:
        """The rows of a micro-batch."""
        return self.share // self.model.accumulate

    @property
    def _sizes(self) -> list[int]:
        """The possible rows of a micro-batch."""
        least = self.share // self.model.mesh.weight  # every rank must be able to divide its rows
        return [rows for rows in range(1, least + 1) if least % rows == 0]

    def resize(self, share: int) -> None:
        """Go on with another number of rows, of which `model.accumulate` is for the new one."""
        self.share = share
        if self.limit is not None and self.rows > self.limit:
            fitting = [rows for rows in self._sizes if rows <= self.limit]
            self.model.accumulate = share // fitting[-1]

    @property
    def smaller(self) -> int | None:
        """The next smaller size, in rows; None when there is none."""
        sizes = [rows for rows in self._sizes if rows < self.rows]
        return sizes[-1] if sizes else None

    def after_step(self, step: int, batch: Batch) -> None:
        """Go on with the search, if there is one.

        The first step allocates the state of the optimizer. The next two have micro-batches of the
        two smallest sizes. Memory is linear in the size, so their peaks give that of any size.
        """
        if self._memory is None or len(self._sizes) < 2:
            return
        self._peaks.append(self._memory.peak())
        self._memory.restart()
        if len(self._peaks) == 2:
            self.model.accumulate = self.share // self._sizes[1]
        elif len(self._peaks) == 3:
            self._choose(self._memory.size())
            self._memory = None

    def _choose(self, size: float) -> None:
        # Ranks may differ a little; all of them take what fits on each.
        facts = torch.tensor([*self._peaks[1:], -size], dtype=torch.float64)
        first, second, least = self.model.mesh.largest(facts.to(self.model.precision.device))
        one, two = self._sizes[:2]
        slope = max(0.0, (second - first) / (two - one))
        limit = _USABLE * -least
        fitting = [rows for rows in self._sizes if first + slope * (rows - one) <= limit]
        rows = fitting[-1] if fitting else one
        self.model.accumulate, self.limit = self.share // rows, rows
        self._record(rows)
        log.info(
            "micro-batches of %d rows, %d per step: %.2f of %.2f GB of memory",
            *(rows, self.model.accumulate, (first + slope * (rows - one)) / 1e9, -least / 1e9),
        )


class Ramp(Part):
    """Divides the batches of each stage of a ramp into its own number of micro-batches.

    With `train.batch_size_ramp` they follow the number of rows of a step's batch.

    `parts` are the micro-batches for each number of rows that a batch of this rank may have.
    """

    def __init__(
        self, model: ParallelModel, parts: Mapping[int, int], sizes: MicroBatches | None
    ) -> None:
        self._model, self._parts, self._sizes, self._rows = model, parts, sizes, 0

    def before_step(self, batch: Batch) -> None:
        """Divide batches of so many rows from now on, if a stage of the ramp has begun."""
        rows = len(batch["mask"])
        if rows != self._rows:
            self._rows, self._model.accumulate = rows, self._parts[rows]
            if self._sizes is not None:
                self._sizes.resize(rows)

    def report(self) -> dict[str, float]:
        """Return the samples of the last step, over all ranks."""
        return {GLOBAL_BATCH_SIZE: self.session.feed.last.group.batch_size}
