"""Notes on a run that goes on although something looks wrong, such as a slow rank."""

import logging
from collections.abc import Callable, Sequence

from hpctrain.base.names.run_record import Note
from hpctrain.tracking.tracker import Tracker

log = logging.getLogger(__name__)


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
