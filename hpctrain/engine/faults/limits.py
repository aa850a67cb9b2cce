"""How long a rank may be in a phase without a mark, learned from the run itself.

    the last 20 times of a phase ── max(10 x their median, 3 x the longest, floor) ── the limit

Without a few such times there is no limit, because nobody knows how long it takes to compile a
model or to evaluate it for the first time. The times are kept in the run directory for the next
attempt. Where a phase ends by death its times are forgotten, and its floor is four times as long as
what was waited for. So a limit that is wrong ends few attempts, and not all of them.
"""

import statistics
from collections import deque
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Record, Seconds, read, written
from hpctrain.base.processes.marks import PHASES

_KEPT, _ENOUGH = 20, 3
_TIMES, _LONGEST_TIMES, _AFTER_DEATH = 10, 3, 4


class _Known(Record, frozen=True):
    """What is known of a phase."""

    seconds: tuple[Seconds, ...] = ()
    floor_s: Seconds = 0.0


class Limits:
    """The limits of the ranks of a node, in seconds.

    `floor_s` is the key of `hang`. No floor grows beyond `most_s`.
    """

    def __init__(self, file: Path, floor_s: float, most_s: float) -> None:
        self._file, self._floor_s, self._most_s = file, floor_s, most_s
        self._known = dict.fromkeys(PHASES, _Known())
        with suppress(FileNotFoundError, DamageError):  # then they are learned again
            self._known |= read(dict[str, _Known], file, parts=3)
        self._seconds: dict[tuple[int, int], deque[float]] = {}  # by rank and phase

    def learn(self, rank: int, phase: int, seconds: float) -> None:
        """Add a time of a rank in a phase."""
        self._of(rank, phase).append(seconds)

    def limit(self, rank: int, phase: int) -> float | None:
        """Return the limit of a rank in a phase; None if there is none yet."""
        seconds = self._of(rank, phase)
        if len(seconds) < _ENOUGH:
            return None
        usual = max(_TIMES * statistics.median(seconds), _LONGEST_TIMES * max(seconds))
        return max(usual, self.floor_s(phase))

    def floor_s(self, phase: int) -> float:
        """Return the shortest limit of a phase."""
        return max(self._floor_s, min(self._known[PHASES[phase]].floor_s, self._most_s))

    def died(self, phase: int, late_s: float) -> None:
        """Forget the times of a phase in which a rank has died, or was late for so long."""
        floor_s = max(self._known[PHASES[phase]].floor_s, _AFTER_DEATH * late_s)
        self._known[PHASES[phase]] = _Known(floor_s=floor_s)
        self._seconds = {key: kept for key, kept in self._seconds.items() if key[1] != phase}
        self.save()

    def save(self) -> None:
        """Write for each phase the times of the rank that takes the longest."""
        for phase, name in enumerate(PHASES):
            kept = [each for (_, of), each in self._seconds.items() if of == phase and each]
            if kept:
                seconds = tuple(max(kept, key=statistics.median))
                self._known[name] = replace(self._known[name], seconds=seconds)
        with suppress(OSError):  # the next attempt learns them again
            write_atomically(self._file, written(self._known), sync=False)

    def _of(self, rank: int, phase: int) -> deque[float]:
        if (rank, phase) not in self._seconds:
            self._seconds[rank, phase] = deque(self._known[PHASES[phase]].seconds, maxlen=_KEPT)
        return self._seconds[rank, phase]
