"""Notes on a run that goes on although something looks wrong, such as a slow rank.

say ── the log, once ── the journal (a page, an alert) ── run.json (`status`, `top`, `report`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hpctrain.run_record import Note
from hpctrain.tracking.tracker import NullTracker, Tracker

log = logging.getLogger(__name__)


class Notes:
    """The notes of a run, one for each topic.

    Args:
        tracker: That of this rank.
        known: Those of the attempts before: what `record` was called with.
        record: Called with all notes when they have changed; None on ranks that say nothing.

    Attributes:
        step: The global step that the run is at.
    """

    def __init__(
        self,
        tracker: Tracker | None = None,
        known: Sequence[Note] = (),
        record: Callable[[list[Note]], None] | None = None,
    ) -> None:
        self._tracker, self._record = tracker or NullTracker(), record
        self._notes = {note.topic: note for note in known}
        self.step = 0

    def begin(self, step: int) -> None:
        """Begin at this step: notes on later ones, which are made again, do not hold."""
        self.step = step
        for topic in [t for t, note in self._notes.items() if note.step > step]:
            self.say(topic, "")

    def say(self, topic: str, text: str, about: str = "") -> None:
        """Say something about a topic, unless the same was said; "" takes back what was said.

        Args:
            topic: One word, such as `flat`.
            text: A whole sentence, which may have other numbers each time.
            about: What it is about, such as a rank: something else is said again.
        """
        known = self._notes.get(topic)
        if self._record is None or (known and known.about == about if text else not known):
            return
        self._notes.pop(topic, None)
        if text:
            log.warning("%s", text)
            self._notes[topic] = Note(topic, text, self.step, about)
        self._tracker.log_note(topic, text, self.step)
        self._record([*self._notes.values()])
