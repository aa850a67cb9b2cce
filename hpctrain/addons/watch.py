"""`train.watch`: a part that sees when the losses of a run, though finite, have diverged."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from hpctrain.base.errors import HealthError
from hpctrain.engine.part import Part
from hpctrain.engine.parts.notes import Notes

_SOON = 20  # steps that a divergence is read from
_DIVERGED = 3.0  # times the loss of the first step


class Watch(Part):
    """Watches a run whose numbers are finite for what says that it learns nothing any more.

    each step     its mean loss, which `hpctrain.engine.faults.health` has read
    log step      losses ── diverged? ── a note, or an error (train.watch=stop)

    All ranks see the same numbers, and decide alike. Nothing is said that a healthy run may show by
    chance, for a wrong note does more harm than a missing one. The policy is the key `train.watch`.
    """

    name = "watch"

    def __init__(self, notes: Notes, policy: str, *, max_steps: int) -> None:
        self._notes, self._policy, self._max_steps = notes, policy, max_steps
        self._first, self._diverged = math.nan, False
        self._recent: deque[float] = deque(maxlen=_SOON)

    def seen(self, step: int, loss: float) -> None:
        """Take the mean loss of a step."""
        if math.isnan(self._first):
            self._first = loss
        self._recent.append(loss)

    def ends(self, step: int) -> None:
        """Let the run end at this step, before `max_steps`, with what is judged next."""
        self._max_steps = min(step, self._max_steps)

    def reported(self, step: int) -> None:
        """Judge the steps until now; all ranks call this together.

        What is wrong is a HealthError if `train.watch` is stop.
        """
        if not self._recent:
            return
        last = sorted(self._recent)
        now, tenth = statistics.median(last), len(last) // 10
        # A few batches without an error have a loss of 0, so nine of ten must be low again, too.
        decides = last[-1 - tenth] if self._diverged else last[tenth]
        self._diverged = len(last) == _SOON and 0 < _DIVERGED * self._first < decides
        text = (
            f"train/loss has diverged: it is {now:.4g} at step {step}, and was {self._first:.4g} "
            "in the first step. Take a smaller optimizer.lr, a longer warm-up, or train.clip_norm"
        )
        self._notes.say("diverged", text * self._diverged)
        if self._diverged and self._policy == "stop" and self._notes.step < self._max_steps:
            raise HealthError(f"{text}. The run stops because of train.watch=stop")

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the steps, as JSON."""
        if math.isnan(self._first):  # JSON has no NaN
            return {}
        # train.watch=stop ends a run by these, so an attempt that was killed must not change them.
        return {"first": self._first, "recent": [*self._recent], "diverged": self._diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; older checkpoints have less, or more."""
        self._first = state.get("first", math.nan)
        self._recent.extend(state.get("recent", ()))
        self._diverged = state.get("diverged", False)
