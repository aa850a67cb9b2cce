"""Evaluations of a model: on one split, and on all splits between two steps of a training.

every train.eval_every steps, or at the end of an epoch ── due ── the metrics of each split
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from hpctrain.base import offered
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.generators import same_generators, seeded_generators
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed.long_work import first_in_long_work
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.layers.dry_run import same_modes
from hpctrain.engine.parallel.reducing.metric_states import MeasuredTask
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.steps.stepping import Stepping
from hpctrain.engine.supervised.step import Totals, TrainStep
from hpctrain.engine.tasks.task import Task, at_step, derived, is_foreign

log = logging.getLogger(__name__)


class Evaluations(Part):
    """Evaluates the model of a step on the feeds of the evaluation, when that is due.

    `feeds` are named by what the names of their metrics begin with, such as `val`. `every` is the
    number of steps between two evaluations; None evaluates at each end of an epoch. The metrics of
    `asked` must be among those of the run: what an evaluation alone can tell makes one due. In the
    context `averaged`, the model has the parameters that are evaluated.

    Attributes:
        due: Whether an evaluation is due, which a stop request may have ended.
    """

    name = "evaluation_due"
    session: Stepping

    def __init__(
        self,
        train_step: TrainStep,
        feeds: Mapping[str, DevicePrefetcher],
        every: int | None,
        asked: Sequence[RequestedMetric] = (),
        averaged: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._train_step, self.feeds, self._every = train_step, feeds, every
        self._asked, self._averaged = asked, averaged
        self.due, self._made_at = False, -1

    def begin(self, step: int) -> None:
        """Note the epoch of the step."""
        self._epoch = self.session.feed.epoch

    def after_step(self, step: int, batch: Batch) -> None:
        """Note whether an evaluation follows this step."""
        epoch, self._epoch = self._epoch, self.session.feed.epoch
        due = self._epoch > epoch if self._every is None else step % self._every == 0
        self.due |= due or step == self.session.max_steps

    def logged(self, metrics: Mapping[str, float], step: int) -> None:
        """Check that there are the metrics that were asked for."""
        for asked in self._asked:
            asked.check(self.session.metrics)

    def reported(self, step: int) -> None:
        """Evaluate soon if only that shows whether a metric exists."""
        self.due |= any(asked.is_doubtful(self.session.metrics) for asked in self._asked)

    def between(self, step: int) -> bool:
        """Make the evaluation that is due, if any; return False when it is still due."""
        return self._evaluate(step) if self.due else True

    def _evaluate(self, step: int) -> bool:
        session = self.session
        session.health.judge(late=False)
        if self.feeds:
            values = self._values()
            if values is None:
                return False
            with session.meter.spent("other"):
                session.log(values | session.meter.evaluated())
            session.call("after_evaluation")
            wrong = [f"{name}={v}" for name, v in values.items() if not math.isfinite(v)]
            if wrong and dist.get_rank() == 0:
                log.warning("step %d: not finite: %s", step, ", ".join(wrong))
        self.due, self._made_at = False, step
        return True

    def at_pause(self) -> dict[str, float] | None:
        """Return the metrics of the step of a pause, unless it was evaluated."""
        if not self.feeds or self._made_at == self.session.step:
            return {}
        values = self._values()
        if values is not None:
            self.session.call("after_evaluation")
        return values

    def close(self) -> None:
        """Close the feeds."""
        for feed in self.feeds.values():
            feed.close()

    def state_dict(self) -> bool:
        """Return whether an evaluation is due."""
        return self.due

    def load_state_dict(self, state: bool) -> None:
        """Go on from what `state_dict` returned."""
        self.due = bool(state)

    def _values(self) -> dict[str, float] | None:
        """Return the metrics of an evaluation; None when the ranks agree to stop."""
        session = self.session
        doing = session.display.doing("an evaluation")
        modes = same_modes(self._train_step.model.module)
        # The random states are restored, as an evaluation may be made twice.
        with session.meter.spent("evaluation"), doing, same_generators(), modes:
            session.call("before_evaluation")
            with session.saving.checkpointer.modes.evaluating(), self._averaged():
                return evaluate_all(self._train_step, self.feeds, session.stop)


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
                offered.check_evaluated(model, task, batch)
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
        step.exchange.ask(stop)  # it is read one batch later, so a GPU still has work to do
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
