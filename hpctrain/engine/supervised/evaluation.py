"""Evaluations of a model: on one split, and on all splits of a training."""

from collections.abc import Callable, Mapping

from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.generators import seeded_generators
from hpctrain.engine.distributed.long_work import first_in_long_work
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.looking.rows import check_mask
from hpctrain.engine.looking.trial import TrialPasses
from hpctrain.engine.parallel.reducing.metric_states import MeasuredTask
from hpctrain.engine.parallel.reducing.scalars import on_device
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.supervised.step import Totals, TrainStep
from hpctrain.engine.tasks.task import Task, at_step, derived, is_foreign


def evaluate(
    model: ParallelModel,
    task: Task,
    feed: DevicePrefetcher,
    is_over: Callable[[], bool],
    *,
    checks: bool = False,
) -> dict[str, float] | None:
    """Return the means over the samples of a feed, each once; the model is in eval mode.

    All ranks call this together. `is_over` is called after each batch; if it is true, the same on
    all ranks, the evaluation ends with None. With `checks`, a task in whose sums rows count that
    only fill up a batch is a ConfigError.
    """
    checks = checks and is_foreign(task) and feed.steps.fills_up(feed.steps_per_epoch)
    totals, measured = Totals(), MeasuredTask(task, model.mesh)
    at_step(task, model.step)
    # What a model or a task draws is the same each time, and for the ranks that share a batch.
    with seeded_generators(model.mesh.dp_rank):
        for batch in first_in_long_work("the first batch of the evaluation", feed):
            if checks:
                check_mask(TrialPasses(model, task, batch), task, in_training=False)
                checks = False
            totals.add(*model.evaluate(measured.task, batch))
            measured.update()
            if is_over():
                return None
    totals.reduce(model.mesh)
    return derived(task, totals.means()) | measured.values()


def evaluate_all(
    step: TrainStep, feeds: Mapping[str, DevicePrefetcher], stop: Stop
) -> dict[str, float] | None:
    """Return the metrics on all feeds of a training; None when the ranks agree to stop."""
    model, values = step.model, dict[str, float]()

    def stops() -> bool:
        if stop.agreed:
            return True
        # The flags are read one batch later, so a GPU still has work to do.
        flags = on_device(stop.flags(), model.precision.device)
        model.mesh.add(flags)
        stop.offer(flags)
        return False

    for prefix, feed in feeds.items():
        model.share_buffers()
        model.module.eval()
        feed.load_state_dict({"consumed": 0})
        means = evaluate(model, step.task, feed, stops)
        if means is None:
            return None
        values |= {f"{prefix}/{name}": value for name, value in means.items()}
    return values
