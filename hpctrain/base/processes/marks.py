"""What this rank does now, in a page of memory that another process can read.

    the training ── enter(EVALUATION), go_on(), stepped(17) ──┐
    a thread ─────── twice a second: that it is alive ────────┼── page ── the observer
                     when it is asked: where the rank is ─────┘

A mark costs about a microsecond, and is made where the training knows what it does: in its
`Account`, at each batch and each step, in `long_work`. Without an `open_page` the marks are made in
a page that nobody reads.

The page is the beginning of a file in memory, which an observer opens as /proc/PID/fd/N, so nothing
is left on a disk. Behind the page are the stacks that `faulthandler` writes at SIGUSR1. It does so
in C, also while other C code holds Python's lock.
"""

import faulthandler
import functools
import json
import mmap
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple

from hpctrain.base import forks

START_UP, LOAD, FIRST_STEP, STEP, EVALUATION, SAVE, END = range(7)
PHASES = ("start-up", "loading", "first step", "step", "evaluation", "checkpoint", "end")

SIZE = 4096  # bytes


class _Marks(NamedTuple):
    """The numbers of a page; all times are of `time.monotonic`."""

    # Not by the main thread:
    alive: float = 0.0  # of the last sign of the thread
    answered: float = 0.0
    asked: float = 0.0  # of the last question where the rank is
    # By the main thread:
    begun: float = 0.0  # since when: a process may train one run after another
    left: float = 0.0  # 1: no marks are made any more, because the rank ends
    long_work: float = 0.0  # more than 0: it may take any time
    phase: float = START_UP
    at: float = 0.0  # of the last mark
    step: float = 0.0  # the number of global steps that were made


_NUMBER, _OF_RANK, _ALL, _STAY = map(struct.Struct, ("d", "6d", "9d", "2d"))
_ALIVE, _ANSWERED, _ASKED, _BEGUN, _AT = (
    8 * _Marks._fields.index(n) for n in ("alive", "answered", "asked", "begun", "at")
)
_TEXT = 256  # where the answer begins


def _stay_at(phase: int) -> int:
    """Where the page has how often a phase was left, and the longest time of the last time."""
    return _ALL.size + _STAY.size * phase


class Page:
    """The page in a file that is open as `descriptor`: that of this process, or of another one."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.bytes = descriptor, mmap.mmap(descriptor, SIZE)
        # What the thread answers beside the line of the code; set where torch is imported.
        self.where: Callable[[], dict[str, Any]] = dict

    def marks(self) -> _Marks:
        """Return what is marked now."""
        return _Marks(*_ALL.unpack_from(self.bytes))

    def stay(self, phase: int) -> tuple[int, float]:
        """Return how often a phase was left, and its longest time without a mark the last time."""
        count, longest = _STAY.unpack_from(self.bytes, _stay_at(phase))
        return int(count), longest

    def ask(self) -> None:
        """Ask the thread where the rank is."""
        _NUMBER.pack_into(self.bytes, _ASKED, monotonic())

    def answer(self) -> dict[str, Any]:
        """Return what the thread has answered since the last mark; empty if it has not."""
        marked = self.marks()
        if marked.answered > marked.at:
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(self.bytes[_TEXT:].rstrip(b"\0"))
                return found
        return {}

    def begin(self) -> None:
        """Make the marks of this process here, from the phase START_UP on."""
        global _rank
        _rank = _Rank(self.bytes)
        self.is_alive()

    def is_alive(self) -> None:
        """Give a sign of life."""
        _NUMBER.pack_into(self.bytes, _ALIVE, monotonic())

    def tell(self, answer: dict[str, Any]) -> None:
        """Answer the last question, in at most 3,840 bytes: longer texts and lists are cut."""
        most = SIZE
        while len(text := json.dumps(_cut(answer, most)).encode()) > SIZE - _TEXT:
            most //= 2
        self.bytes[_TEXT:] = text.ljust(SIZE - _TEXT, b"\0")
        _NUMBER.pack_into(self.bytes, _ANSWERED, monotonic())


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, dict):
        return {name: _cut(each, most) for name, each in value.items()}
    if isinstance(value, list):
        return [_cut(each, most // 2) for each in value[: max(1, most // 64)]]
    return value[:most] if isinstance(value, str) else value


class _Rank:
    """What the main thread knows of itself."""

    def __init__(self, page: Any) -> None:
        self.page, self.at, self.longest = page, monotonic(), 0.0
        self.begun = self.at
        self.step = self.phase = self.long_work = self.left = 0
        self.has_stepped, self.counts = False, [0] * len(PHASES)
        self.write()

    def write(self) -> None:
        known = self.begun, self.left, self.long_work, self.phase, self.at, self.step
        _OF_RANK.pack_into(self.page, _BEGUN, *known)


_rank = _Rank(bytearray(SIZE))


@functools.cache
def open_page() -> Page:
    """Return the page of this process, and let SIGUSR1 write the stacks behind it from now on."""
    file = os.memfd_create("hpctrain-marks")
    os.ftruncate(file, SIZE)
    os.lseek(file, SIZE, os.SEEK_SET)  # `faulthandler` writes there
    forks.keep_private(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True, chain=False)
    # A fork of the user's code is ended by the signal, as without us.
    os.register_at_fork(after_in_child=functools.partial(faulthandler.unregister, signal.SIGUSR1))
    return Page(file)


def go_on() -> None:
    """Mark that this rank gets on with its phase."""
    now = monotonic()
    if now - _rank.at > _rank.longest:
        _rank.longest = now - _rank.at
    _rank.at = now
    _NUMBER.pack_into(_rank.page, _AT, now)


def took(phase: int, seconds: float) -> None:
    """Mark how long the work of a phase took that was done beside other phases."""
    if phase == _rank.phase:
        _rank.longest = max(_rank.longest, seconds)


def enter(phase: int) -> None:
    """Mark that this rank begins with a phase."""
    go_on()
    if phase == START_UP:
        _rank.has_stepped = False
    if phase == _rank.phase != STEP:
        return
    _rank.counts[_rank.phase] += 1
    stay = _rank.counts[_rank.phase], _rank.longest
    _STAY.pack_into(_rank.page, _stay_at(_rank.phase), *stay)
    _rank.phase, _rank.longest = phase, 0.0
    _rank.write()


def was_left() -> bool:
    """Return whether this rank has been in its phase before."""
    return _rank.counts[_rank.phase] > 0


def begin_step() -> None:
    """Mark that this rank asks for the batch of a step."""
    if _rank.phase != STEP:
        enter(STEP if _rank.has_stepped else FIRST_STEP)


def stepped(step: int) -> None:
    """Mark that this rank has made so many global steps."""
    _rank.step, _rank.has_stepped = step, True
    enter(STEP)


def leave() -> None:
    """Mark that this rank ends, for whatever reason."""
    _rank.left = 1
    _rank.write()


@contextmanager
def in_long_work() -> Iterator[None]:
    """Mark that the context may take any time."""
    _rank.long_work += 1
    _rank.write()
    try:
        yield
    finally:
        _rank.long_work -= 1
        _rank.at = monotonic()
        _rank.write()
