"""The best value of a metric so far: early stopping and the best checkpoint both stand on it.

Every rank has the same metrics, as they are means over all ranks, so all of them decide alike.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.base.names.metric_names import lower_is_better
from hpctrain.engine.part import Part


class Improvement:
    """Follows one metric, or nothing if it is None.

    Its name tells which values are better. A value is better only if it is so by more than
    `min_delta`; after `patience` values in a row that are
    not (`since` counts them) the run ends, with None it never does. `value` is the best one, None
    before the first, and `step` its global step.
    """

    def __init__(
        self, metric: str | None = None, min_delta: float = 0.0, patience: int | None = None
    ) -> None:
        self.metric = metric
        self._lower = lower_is_better(metric or "")
        self._min_delta, self._patience = min_delta, patience
        self.value: float | None = None
        self.step = self.since = 0

    @property
    def is_over(self) -> bool:
        """Whether the patience is used up."""
        return self._patience is not None and self.since >= self._patience

    def judge(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take the value of a step; return whether it is the best so far.

        The metrics are those that are new at this step; without the one that is followed nothing
        changes.
        """
        if self.metric is None or self.metric not in metrics:
            return False
        value = metrics[self.metric]
        if math.isfinite(value) and (self.value is None or self._gain(value) > self._min_delta):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def _gain(self, value: float) -> float:
        assert self.value is not None
        return self.value - value if self._lower else value - self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        own = {"value": self.value, "step": self.step, "since": self.since}
        return {"metric": self.metric, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, unless that is of another metric, or of none."""
        if self.metric is not None and state.get("metric") == self.metric:
            self.value, self.step, self.since = state["value"], state["step"], state["since"]


class Patience(Improvement, Part):
    """Ends the training when the metric of `train.early_stopping` has not become better."""

    name = "patience"

    @property
    def over(self) -> str:
        """Why the training ends early, for people; "" if it does not."""
        if not self.is_over:
            return ""
        if self.value is None:
            return f"early stopping: {self.metric} was never finite in {self.since} evaluations"
        return (
            f"early stopping: {self.metric} was best at step {self.step} ({self.value:.6g}), and "
            f"not better in the {self.since} evaluations since"
        )

    def logged(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step."""
        self.judge(metrics, step)


class Best(Improvement):
    """Follows the metric of `checkpoint.best`, and tells when its best value is safe.

    The metric None keeps no best checkpoint. Every rank calls `record` with the metric, its best
    value and its step, as soon as the checkpoint of that step is committed. `exists` tells whether
    there still is a checkpoint of a step, the same on all ranks.
    """

    def __init__(
        self,
        metric: str | None = None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        exists: Callable[[int], bool] = lambda _: True,
    ) -> None:
        super().__init__(metric)
        self._record, self._exists = record, exists
        self._marked = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The best value so far and its step, as metrics."""
        assert self.value is not None
        return {f"best/{self.metric}": self.value, "best/step": self.step}

    def is_due(self, step: int) -> bool:
        """Return whether this step is the best so far, and has no checkpoint yet."""
        return self.value is not None and self.step == step != self._marked

    def mark(self, saved: int) -> None:
        """Record the best value if its checkpoint is that of the step that was saved last."""
        if self.is_due(saved):
            self._marked = saved
            self._record({"metric": self.metric, "value": self.value, "step": self.step})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, unless the checkpoint of the best step is gone."""
        if state["value"] is not None and self._exists(state["step"]):
            super().load_state_dict(state)
            self.mark(self.step)  # the attempt before may have ended before it could record it
