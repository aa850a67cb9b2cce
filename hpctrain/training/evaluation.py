"""One evaluation of a model on one split: that of the training, and that of a trained run."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.workers.pool import stacks
from hpctrain.distributed.long_work import first_in_long_work
from hpctrain.faults.late_data import told_if_late
from hpctrain.parallel.reducing.metric_states import Measured
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.tasks import Task, derived
from hpctrain.training.step import Totals

_WHAT = "the first batch of the evaluation"


def evaluate(
    model: ParallelModel, task: Task, feed: DevicePrefetcher, is_over: Callable[[], bool]
) -> dict[str, float] | None:
    """Return the means over the samples of a feed, each once; the model is in eval mode.

    All ranks call this together. `is_over` is called after each batch; if it is true, the same on
    all ranks, the evaluation ends with None.
    """
    totals, measured = Totals(), Measured(task, model.mesh)
    for batch in first_in_long_work(_WHAT, told_if_late(_WHAT, feed, stacks)):
        totals.add(*model.evaluate(measured.task, batch))
        measured.update()
        if is_over():
            return None
    totals.reduce(model.mesh)
    return derived(task, totals.means()) | measured.values()
