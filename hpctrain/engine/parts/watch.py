"""Watches a run whose numbers are finite for what says that it learns nothing, or no longer.

    each step     its mean loss, which `hpctrain.engine.faults.health` has read
    log step      losses ── diverged? ── layers without a gradient ── a note, or an error
                                                                      (train.watch=stop)

All ranks see the same numbers, and decide alike. Nothing is said that a healthy run may show by
chance, for a wrong note does more harm than a missing one.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.engine.part import Part
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.parts.silent_layers import SilentLayers
from hpctrain.errors import HealthError

_LEAST_STEPS, _SOON = 100, 20  # before layers are judged; those that a divergence is read from
_DIVERGED = 3.0  # times the loss of the first step


class Watch(Part):
    """Watches one run, and says in `notes` what it finds; the policy is the key `train.watch`.

    Layers are not judged before the step `after`; `silent` looks at their gradients.
    """

    name = "watch"

    def __init__(
        self,
        notes: Notes,
        policy: str,
        *,
        max_steps: int,
        after: int = 0,
        silent: SilentLayers | None = None,
    ) -> None:
        self._notes, self._policy, self._max_steps = notes, policy, max_steps
        self._after, self._first = max(after, _LEAST_STEPS), math.nan
        self._recent: deque[float] = deque(maxlen=_SOON)
        self._silent: set[str] = set()
        self._diverged, self._layers = False, silent

    def seen(self, step: int, loss: float) -> None:
        """Take the mean loss of a step."""
        if math.isnan(self._first):
            self._first = loss
        self._recent.append(loss)

    def ends(self, step: int) -> None:
        """Let the run end at this step, before `max_steps`, with what is judged next."""
        self._max_steps = min(step, self._max_steps)

    def reported(self, step: int) -> None:
        """Judge the steps since the last report."""
        if self._layers is None:
            self.judge(step, None, 0)
        else:
            self.judge(step, self._layers.read(), self._layers.layers)

    def judge(self, step: int, silent: Sequence[str] | None, layers: int) -> None:
        """Judge the steps until now; all ranks call this together.

        `silent` are those of the `layers` whose gradient was zero in all steps that were looked at
        since the last time; None if too few were. What is wrong is a HealthError if `train.watch`
        is stop.
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
        self._say("diverged", text * self._diverged)
        if silent is not None:
            self._judge_layers({*silent}, step, layers)

    def _judge_layers(self, silent: set[str], step: int, layers: int) -> None:
        dead = silent & self._silent if self._silent or step < self._max_steps else silent
        self._silent = silent
        if step < self._after or self._recent[-1] == 0:  # a loss of 0 has no gradient
            return
        names = ", ".join(sorted(dead)[:3]) + (" and others" if len(dead) > 3 else "")
        text = (
            f"no gradient reaches {len(dead)} of {layers} layers ({names}): it is exactly zero at "
            f"step {step}, so they learn nothing. Units behind them may be dead (ReLU, a mask, a "
            "detach): take a smaller optimizer.lr or other initial weights"
        )
        self._say("layers", text * bool(dead), " ".join(sorted(dead)))

    def _say(self, topic: str, text: str, about: str = "") -> None:
        self._notes.say(topic, text, about)
        if text and self._policy == "stop" and self._notes.step < self._max_steps:
            raise HealthError(f"{text}. The run stops because of train.watch=stop")

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the steps, as JSON."""
        if math.isnan(self._first):  # JSON has no NaN
            return {}
        # train.watch=stop ends a run by these, so an attempt that was killed must not change them.
        known = {"first": self._first, "recent": [*self._recent], "silent": sorted(self._silent)}
        return known | {"diverged": self._diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; older checkpoints have less, or more."""
        self._first = state.get("first", math.nan)
        self._recent.extend(state.get("recent", ()))
        self._silent = {*state.get("silent", ())}
        self._diverged = state.get("diverged", False)
