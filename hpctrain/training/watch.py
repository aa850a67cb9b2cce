"""Watches a run whose numbers are finite for what says that it learns nothing, or no longer.

    each step     its mean loss, which `hpctrain.faults.health` has read ── spikes
    log step      losses ── diverged? fallen? ── layers without a gradient ──┬── a note, or an error
    evaluation    no better than a guess? ───────────────────────────────────┘   (train.watch=stop)

All ranks see the same numbers, and decide alike. Nothing is said that a healthy run may show by
chance, for a wrong note does more harm than a missing one.
"""

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hpctrain.errors import HealthError
from hpctrain.metric_names import lower_is_better
from hpctrain.training.notes import Notes

_LEAST_STEPS, _LATER = 100, 1000  # the first judgement at the end of a run, and before its end
_RECENT, _SOON = 100, 20  # steps
_BLOCKS = 128  # means of equally many steps that describe the whole run
_SPIKE, _UNDONE = 10.0, 0.5  # times the range of the recent losses; part of the progress
_DIVERGED = 3.0  # times the loss of the first step
_FALLS = 1.0  # standard deviations of Mann and Whitney's U
_EVALUATIONS, _PROGRESS = 5, 1e-4  # so many of them fall by this part
_BEATEN = 0.98  # of the loss of the guess


class Guess(NamedTuple):
    """What an evaluation of a model that knows nothing of its input would have."""

    metric: str  # one whose name tells which values are better
    value: float
    margin: float  # a model that is better by less may have been lucky
    what: str  # what guesses so, in words
    loss: float = -math.inf  # a model whose `val/loss` is lower has learnt something

    def beats(self, values: Mapping[str, float]) -> bool:
        """Return whether the guess is as good as these metrics of an evaluation."""
        own, sign = values[self.metric], -1 if lower_is_better(self.metric) else 1
        better = sign * (own - self.value) > self.margin
        return math.isfinite(own) and not better and values["val/loss"] >= _BEATEN * self.loss


class Watch:
    """Watches one run, and says in `notes` what it finds; the policy is the key `train.watch`.

    Nothing but spikes and a divergence is judged before the step `after`. An evaluation is compared
    with `guess`. `moves`: the loss has to fall, which one that begins with trained weights may not.
    `evaluates`: an evaluation follows the last step, `max_steps`.
    """

    def __init__(
        self,
        notes: Notes | None = None,
        policy: str = "off",
        *,
        max_steps: int = 0,
        after: int = 0,
        guess: Guess | None = None,
        moves: bool = True,
        evaluates: bool = False,
    ) -> None:
        self._notes, self._policy, self._max_steps = notes or Notes(), policy, max_steps
        self._after, self._guess = max(after, _LEAST_STEPS), guess
        self._moves, self._evaluates = moves, evaluates
        self._first, self._limit = math.nan, math.inf
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._spike: tuple[int, float, float] | None = None  # step, loss, and the loss before
        self._blocks: list[float] = []
        self._block, self._size = [0.0, 0.0], 1  # sum and number of the steps of the next block
        self._evaluated: list[float] = []  # the last val/loss
        self._silent: set[str] = set()
        self._next = max(_LATER, max_steps // 10)  # many looks would find something by chance
        self._diverged = False

    def seen(self, step: int, loss: float) -> None:
        """Take the mean loss of a step."""
        if math.isnan(self._first):
            self._first = loss
        if loss > self._limit:
            before = statistics.median(self._recent)
            if self._spike is None or loss - before > self._spike[1] - self._spike[2]:
                self._spike = step, loss, before
        self._recent.append(loss)
        if step % 10 == 0 and len(self._recent) >= _RECENT // 2:
            level = statistics.median(self._recent)
            above = (_SPIKE * (max(self._recent) - level), _UNDONE * (self._first - level))
            self._limit = level + max(*above, abs(level) / 10)
        self._block = [self._block[0] + loss, self._block[1] + 1]
        if self._block[1] == self._size:
            self._blocks.append(self._block[0] / self._size)
            self._block = [0.0, 0.0]
        if len(self._blocks) == _BLOCKS:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
            self._blocks, self._size = [(a + b) / 2 for a, b in pairs], 2 * self._size

    def ends(self, step: int) -> None:
        """Let the run end at this step, before `max_steps`, with what is judged next."""
        self._max_steps, self._evaluates = min(step, self._max_steps), False

    def report(self, step: int, silent: Sequence[str] | None, layers: int) -> None:
        """Judge the steps until now; all ranks call this together.

        `silent` are those of the `layers` whose gradient was zero in all steps that were looked at
        since the last time; None if too few were. What is wrong is a HealthError if `train.watch`
        is stop.
        """
        if self._policy == "off" or not self._recent:
            return
        self._say_spike()
        last = sorted([*self._recent][-_SOON:])
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
        if step < self._max_steps or not self._evaluates:
            self._judge_loss(step)

    def evaluated(self, values: Mapping[str, float], step: int) -> None:
        """Judge the metrics of an evaluation as `report` judges steps."""
        if self._policy == "off" or "val/loss" not in values:
            return
        self._evaluated = [*self._evaluated, values["val/loss"]][-_EVALUATIONS:]
        self._judge_loss(step)
        is_due = step >= min(self._max_steps, max(_LATER, self._max_steps // 4))
        guess = self._guess
        if guess is not None and is_due and step >= self._after and guess.metric in values:
            text = (
                f"{guess.metric} is {values[guess.metric]:.4g} at step {step}, no better than "
                f"{guess.what} ({guess.value:.4g})"
            )
            self._say(
                "chance", text * (guess.beats(values) and bool(self._silent or not self._learns()))
            )

    def _say_spike(self) -> None:
        if self._spike is None:
            return
        step, loss, before = self._spike
        now = statistics.median([*self._recent][-5:])
        since = "it came back" if now < (before + loss) / 2 else f"it is {now:.4g} since"
        text = (
            f"train/loss had a spike: {loss:.4g} in step {step}, and {before:.4g} before; {since}"
        )
        self._notes.say("spike", text, f"{step} {since[:8]}")

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

    def _judge_loss(self, step: int) -> None:
        is_due = step >= min(self._next, self._max_steps)
        if not self._moves or self._diverged or step < self._after or not is_due:
            return
        self._next = 2 * step
        text = (
            f"train/loss has not fallen in {step} steps: it was {self._first:.4g} in the first one "
            f"and is {statistics.median(self._recent):.4g}, within its noise"
        )
        self._say("flat", text * (not self._learns() and not self._has_fallen()))

    def _learns(self) -> bool:
        """Return whether the last evaluations were each better than the one before."""
        losses = self._evaluated or [math.nan]
        falls = all(after < before for before, after in pairwise(losses))
        return falls and losses[-1] < losses[0] - _PROGRESS * abs(losses[0])

    def _has_fallen(self) -> bool:
        """Return whether the losses have fallen at the begin of the run, or over the run."""
        recent = sorted(self._recent)
        low, high = recent[len(recent) // 20], recent[-1 - len(recent) // 20]
        if self._first - max(high, statistics.median(recent) + high - low) > 0:
            return True
        middle = len(self._blocks) // 2
        before, after = self._blocks[:middle], sorted(self._blocks[middle:])
        above = sum((bisect_left(after, x) + bisect_right(after, x)) / 2 for x in before)
        pairs = len(before) * len(after)
        deviation = math.sqrt(pairs * (len(before) + len(after) + 1) / 12)
        return above - pairs / 2 > _FALLS * deviation

    def _say(self, topic: str, text: str, about: str = "") -> None:
        self._notes.say(topic, text, about)
        if text and self._policy == "stop" and self._notes.step < self._max_steps:
            raise HealthError(f"{text}. The run stops because of train.watch=stop")

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the steps, as JSON."""
        blocks = [self._blocks, self._block, self._size]
        known = {"first": self._first, "blocks": blocks, "evaluated": self._evaluated}
        # train.watch=stop ends a run by these, so an attempt that was killed must not change them.
        known |= {"recent": [*self._recent], "spike": self._spike, "silent": sorted(self._silent)}
        known |= {"next": self._next, "diverged": self._diverged}
        known |= {"limit": None if math.isinf(self._limit) else self._limit}
        return {} if math.isnan(self._first) else known  # JSON has no NaN, and no infinity

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; older checkpoints do not have it."""
        if state:
            self._first, self._evaluated = state["first"], state["evaluated"]
            self._blocks, self._block, self._size = state["blocks"]
        if "recent" in state:
            self._recent.extend(state["recent"])
            self._spike = state["spike"] and tuple(state["spike"])
            self._silent, self._next = {*state["silent"]}, state["next"]
            self._diverged = state["diverged"]
            self._limit = math.inf if state["limit"] is None else state["limit"]
