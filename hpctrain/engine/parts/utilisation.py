"""How much of what the devices can compute the training uses: MFU.

    MFU = FLOPs of the model per sample x samples/s / (devices x peak)      PaLM, appendix B

(Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways".) The FLOPs are counted at
the first step, from the shapes of its batch. A run whose batches change their shapes has no MFU,
because its samples differ in their FLOPs.
"""

import logging
from collections.abc import Callable

from hpctrain.config import metric_registry as names
from hpctrain.data.shards.types import Batch

log = logging.getLogger(__name__)


class Utilisation:
    """The MFU of a run.

    `count` returns the operations that the model and its loss need for a sample of a batch, and
    their gradients; None if they cannot be counted. `peak` is
    FLOP/s of all devices together, for the format that computes. `due`: `begin` has to be called
    with the next batch.
    """

    def __init__(self, count: Callable[[Batch], int | None], peak: float) -> None:
        self._count, self._peak = count, peak
        self._work: int | None = None
        self._shapes: list[tuple[int, ...]] = []
        self._told = False
        self.due = True

    def begin(self, batch: Batch) -> None:
        """Count the operations of the samples of the first batch."""
        self.due = False
        self._work, self._shapes = self._count(batch), _shapes(batch)

    def see(self, batch: Batch) -> None:
        """Note the shapes of a batch."""
        if self._work is not None and _shapes(batch) != self._shapes:
            self._work = None
            log.info("no MFU: the samples of different batches have different shapes")

    def metrics(self, samples_per_s: float) -> dict[str, float]:
        """Return the MFU at this speed, where it is known."""
        if self._work is None:
            return {}
        mfu = 100 * self._work * samples_per_s / self._peak
        if mfu > 100:
            if not self._told:
                log.error(
                    "MFU would be %.0f%%, more than the devices can do, so it is not recorded: the "
                    "peak of %.4g TFLOP/s in the figures of the hardware is too low, or the FLOPs "
                    "of the model are counted wrongly",
                    *(mfu, self._peak / 1e12),
                )
            self._told = True
            return {}
        return {names.MFU_PERCENT: mfu}


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tensor.shape[1:] for tensor in batch.values()]
