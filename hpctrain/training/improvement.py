"""The best value of a metric so far: early stopping and the best checkpoint both stand on it.

Every rank has the same metrics, as they are means over all ranks, so all of them decide alike.
"""

from __future__ import annotations

import math
from typing import Any

from hpctrain.config.rules.metrics import better


class Improvement:
    """Follows one metric, or nothing if it is None.

    The mode is "min" or "max", which values are better; None takes it from the name. A value is
    better only if it is better by more than `min_delta`; after `patience` values in a row that are
    not (`since` counts them) the run ends, with None it never does. `value` is the best one, None
    before the first, and `step` its global step.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        min_delta: float = 0.0,
        patience: int | None = None,
    ) -> None:
        self.metric = metric
        self._lower = mode == "min" if mode else better(metric or "") == "lower"
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

        The metrics are those that are new at this step; without the one that is followed nothing
        changes.
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
