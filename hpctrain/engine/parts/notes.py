"""Notes on a run that goes on although something looks wrong, such as a slow rank."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpctrain.base.names.run_record import Note
from hpctrain.engine.part import Part
from hpctrain.errors import HealthError
from hpctrain.tracking.tracker import Tracker

log = logging.getLogger(__name__)
_SOON = 20  # steps that a divergence is read from
_DIVERGED = 3.0  # times the loss of the first step


class Notes:
    """The notes of a run, one for each topic; `step` is the global step that the run is at.

    say ── the log, once ── the journal (a page, trackers) ── run.json (`status`, `top`, `report`)

    A note says that a run goes on although something looks wrong, such as a slow rank.

    `known` are those of the attempts before. `record` is called with all notes when they have
    changed; it is None on ranks that say nothing.
    """

    def __init__(
        self,
        tracker: Tracker | None = None,
        known: Sequence[Note] = (),
        record: Callable[[list[Note]], None] | None = None,
    ) -> None:
        self._tracker, self._record = tracker or Tracker(), record
        self._notes = {note.topic: note for note in known}
        self.step = 0

    def begin(self, step: int) -> None:
        """Begin at this step: notes on later ones, which are made again, do not hold."""
        self.step = step
        for topic in [t for t, note in self._notes.items() if note.step > step]:
            self.say(topic, "")

    def say(self, topic: str, text: str, about: str = "") -> None:
        """Say something about a topic, unless the same was said; "" takes back what was said.

        The text may have other numbers each time. It is said again if it is `about` something else,
        such as another rank.
        """
        known = self._notes.get(topic)
        if self._record is None or (known and known.about == about if text else not known):
            return
        self._notes.pop(topic, None)
        if text:
            log.warning("%s", text)
            self._notes[topic] = Note(topic, text, self.step, about)
        elif known:
            log.warning("taken back at step %d, no longer so: %s", self.step, known.text)
        self._tracker.log_note(topic, text, self.step)
        self._record([*self._notes.values()])


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
