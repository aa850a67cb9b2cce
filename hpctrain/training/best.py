"""The best checkpoint: it is saved when a metric is better than ever before, kept and marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.training.improvement import Improvement


class Best(Improvement):
    """Follows the metric of `checkpoint.best`, and tells when its best value is safe.

    The metric None keeps no best checkpoint; the mode is "min" or "max", None takes it from the
    name. Every rank calls `record` with the metric, its best value and its step, as soon as the
    checkpoint of that step is committed. `exists` tells whether there still is a checkpoint of a
    step, the same on all ranks.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        exists: Callable[[int], bool] = lambda _: True,
    ) -> None:
        super().__init__(metric, mode)
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
