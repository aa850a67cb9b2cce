"""`train.batch_size_ramp`: the micro-batches follow the number of rows of a step's batch."""

from collections.abc import Mapping

from hpctrain.config.metric_registry import GLOBAL_BATCH_SIZE
from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.supervised.micro_batches import MicroBatches


class Ramp(Part):
    """Divides the batches of each stage of a ramp into its own number of micro-batches.

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
