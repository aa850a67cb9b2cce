"""The best value of a metric so far: early stopping and the best checkpoint both stand on it.

Every rank has the same metrics, as they are means over all ranks, so all of them decide alike.
"""

from __future__ import annotations

import math
from typing import Any

from hpctrain.config.rules.metrics import lower_is_better


class Improvement:
    """Follows one metric.

    Args:
        metric: The name of the metric; None follows nothing.
        mode: "min" or "max", which values are better; None takes it from the name.
        min_delta: A value is better only if it is better by more than this.
        patience: So many values in a row that are not better end the run; None never does.

    Attributes:
        metric: The name of the metric.
        value: The best value; None before the first one.
        step: The global step of the best value.
        since: The number of values after the best one.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        min_delta: float = 0.0,
        patience: int | None = None,
    ) -> None:
        self.metric = metric
        self._lower = lower_is_better(metric or "", mode)
        self._min_delta, self._patience = min_delta, patience
        self.value: float | None = None
        self.step = self.since = 0

    @property
    def is_over(self) -> bool:
        """Whether the patience is used up."""
        return self._patience is not None and self.since >= self._patience

    @property
    def reason(self) -> str:
        """Why the run ends early, for people."""
        if self.value is None:
            return f"early stopping: {self.metric} was never finite in {self.since} evaluations"
        return (
            f"early stopping: {self.metric} was best at step {self.step} ({self.value:.6g}), and "
            f"not better in the {self.since} evaluations since"
        )

    def judge(self, metrics: dict[str, float], step: int) -> bool:
        """Take the value of a step; return whether it is the best so far.

        Args:
            metrics: The metrics that are new at this step. Without the metric nothing changes.
            step: The global step.
        """
        if self.metric not in metrics:
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
        """Go on from what `state_dict` returned, unless that is of another metric."""
        if state["metric"] == self.metric:
            self.value, self.step, self.since = state["value"], state["step"], state["since"]
