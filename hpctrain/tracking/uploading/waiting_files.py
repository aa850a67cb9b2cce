"""Files that wait until the place of the artifacts takes them; everything else goes first.

    a record of a file ── noted in uploaded.json ── the position goes on ── metrics, params, status
                                   └── published ── or tried again: later, at the end, and by `sync`

A file that cannot be stored goes to the end of the list, so that it holds up no other.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.tracking.journal import journal_path, read
from hpctrain.tracking.uploading.mlrun import MlflowRun
from hpctrain.tracking.uploading.publish import publish

_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 600.0  # seconds between two tries


class WaitingFiles:
    """What is left to be published of one journal: the positions of the records, in their order."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.positions: list[int] = []
        self._next = self._pause = 0.0  # on the monotonic clock; seconds

    def begin(self, positions: Sequence[int]) -> None:
        """Go on with what an uploader before has left."""
        self.positions = list(positions)

    def add(self, position: int) -> None:
        """Let a record wait."""
        if position not in self.positions:
            self.positions.append(position)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another try."""
        return bool(self.positions) and time.monotonic() >= self._next

    def publish(self, run: MlflowRun, note: Callable[[], None], *, all_of_them: bool) -> None:
        """Publish the records that wait, each at most once; `note` is called after each.

        Without `all_of_them` the first failure ends it: a place that is not there can take minutes
        to say so.
        """
        for position in list(self.positions):
            records, _ = read(journal_path(self._run_dir), position, limit=1)
            published = not records or publish(run, self._run_dir, records[0].body)
            self.positions.remove(position)
            if published:
                self._pause = 0.0
                note()
                continue
            self.positions.append(position)
            self._pause = min(2 * self._pause or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._next = time.monotonic() + self._pause
            if not all_of_them:
                return
