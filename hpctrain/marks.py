"""What this rank does now, in a page of memory that another process can read.

    the training ── enter(EVALUATION), go_on(), stepped(17) ──┐
    a thread ─────── twice a second: that it is alive ────────┼── page ── hpctrain.faults.observer
                     when it is asked: where the rank is ─────┘

A mark costs less than a microsecond, and is made where the training knows what it does: in its
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple

from hpctrain import forks

START_UP, LOAD, FIRST_STEP, STEP, EVALUATION, SAVE, END = range(7)
PHASES = ("start-up", "loading", "first step", "step", "evaluation", "checkpoint", "end")

SIZE = 4096  # bytes


class _Marks(NamedTuple):
    """The numbers of a page; all times are of `time.monotonic`."""

    at: float  # of the last mark
    alive: float  # of the last sign of the thread
    asked: float  # of the last question where the rank is
    answered: float
    step: float  # the number of global steps that were made
    phase: float
    longest: float  # time without a mark in this phase
    long_work: float  # more than 0: it may take any time
    stepped: float  # 1: a step was made
    left: float  # 1: no marks are made any more, because the rank ends


_AT, _ALIVE, _ASKED, _ANSWERED, _STEP, _PHASE, _LONGEST, _LONG_WORK, _STEPPED, _LEFT = range(10)
_STAYS = 10  # for each phase, how often it was left, and the longest time of the last time
_TEXT = 256  # where the answer begins, in bytes


class Page:
    """The page in a file that is open as `descriptor`, for those who read it."""

    def __init__(self, descriptor: int) -> None:
        self._bytes = mmap.mmap(descriptor, SIZE)
        self._values = memoryview(self._bytes)[:_TEXT].cast("d")

    def marks(self) -> _Marks:
        """Return what is marked now."""
        return _Marks(*self._values[:_STAYS])

    def stay(self, phase: int) -> tuple[int, float]:
        """Return how often a phase was left, and its longest time without a mark the last time."""
        at = _STAYS + 2 * phase
        return int(self._values[at]), self._values[at + 1]

    def ask(self) -> None:
        """Ask the thread where the rank is."""
        self._values[_ASKED] = monotonic()

    def answer(self) -> dict[str, Any]:
        """Return what the thread has answered since the last mark; empty if it has not."""
        if self._values[_ANSWERED] > self._values[_AT]:
            with suppress(ValueError):
                found: dict[str, Any] = json.loads(self._bytes[_TEXT:].rstrip(b"\0"))
                return found
        return {}


class OwnPage(Page):
    """The page of this process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hpctrain-marks")
        os.ftruncate(self.descriptor, SIZE)
        os.lseek(self.descriptor, SIZE, os.SEEK_SET)  # `faulthandler` writes there
        super().__init__(self.descriptor)
        forks.keep_private(self.descriptor)

        # What the thread answers beside the line of the code; set where torch is imported.
        self.where: Callable[[], dict[str, Any]] = dict

    def begin(self) -> None:
        """Begin with the phase START_UP."""
        global _values
        _values = self._values
        _values[_LEFT] = _values[_LONG_WORK] = _values[_STEP] = _values[_PHASE] = 0.0
        _values[_AT] = _values[_ALIVE] = monotonic()

    def is_alive(self) -> None:
        """Give a sign of life."""
        self._values[_ALIVE] = monotonic()

    def tell(self, answer: dict[str, Any]) -> None:
        """Answer the last question, in at most 3,840 bytes."""
        text = json.dumps(answer).encode()
        self._bytes[_TEXT:] = text.ljust(SIZE - _TEXT, b"\0")[: SIZE - _TEXT]
        self._values[_ANSWERED] = monotonic()


_values = memoryview(bytearray(_TEXT)).cast("d")


@functools.cache
def open_page() -> OwnPage:
    """Return the page of this process, and let SIGUSR1 write the stacks behind it from now on."""
    page = OwnPage()
    faulthandler.register(signal.SIGUSR1, page.descriptor, all_threads=True, chain=False)
    # A fork of the user's code is ended by the signal, as without us.
    os.register_at_fork(after_in_child=functools.partial(faulthandler.unregister, signal.SIGUSR1))
    return page


def go_on() -> None:
    """Mark that this rank gets on with its phase."""
    now = monotonic()
    took = now - _values[_AT]
    if took > _values[_LONGEST]:
        _values[_LONGEST] = took
    _values[_AT] = now


def enter(phase: int) -> None:
    """Mark that this rank begins with a phase."""
    go_on()
    if phase == START_UP:
        _values[_STEPPED] = 0.0
    if phase == _values[_PHASE] != STEP:
        return
    at = _STAYS + 2 * int(_values[_PHASE])
    _values[at + 1] = _values[_LONGEST]
    _values[at] += 1
    _values[_LONGEST], _values[_PHASE] = 0.0, phase


def begin_step() -> None:
    """Mark that this rank asks for the batch of a step."""
    if _values[_PHASE] != STEP:
        enter(STEP if _values[_STEPPED] else FIRST_STEP)


def stepped(step: int) -> None:
    """Mark that this rank has made so many global steps."""
    _values[_STEP], _values[_STEPPED] = step, 1.0
    enter(STEP)


def leave() -> None:
    """Mark that this rank ends, for whatever reason."""
    _values[_LEFT] = 1.0


@contextmanager
def in_long_work() -> Iterator[None]:
    """Mark that the context may take any time."""
    _values[_LONG_WORK] += 1
    try:
        yield
    finally:
        _values[_AT] = monotonic()
        _values[_LONG_WORK] -= 1
