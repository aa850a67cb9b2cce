"""Forks of the user's own code, which behave as if hpctrain were not there, and our own programs.

    this process   SIGTERM ── the wakeup descriptor ── the thread of `Stop` ── save and stop
    its fork       SIGTERM ── what it did before hpctrain came: it ends the fork

A fork inherits the handlers of signals and the wakeup descriptor. Without this module,
`Process.terminate()` of `multiprocessing` would not end the fork, but stop the run. The signals are
blocked until the fork has its own handlers, because one that arrives earlier would be heard here.
A fork also inherits open files. One that outlives the run would keep the lock of the run, and the
pipes whose end tells the uploader and the sensors that the run is over. So it loses those. What it
raises, as `sys.exit` does, ends it where the user's code was called.
A program that is started by `subprocess` inherits none of this. But Slurm signals every process of
a step, and one that dies of it looks like a failure: `run` runs a program that this does not reach.
"""

import ctypes
import os
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import FrameType
from typing import Any, ClassVar

Handler = Callable[[int, FrameType | None], None]
# A scheduler, a terminal or a user sends these signals to every process of a job.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_ours: set[Any] = set()
_before: dict[int, Any] = {}  # what a signal did before the first of our handlers
_wakeups: set[int] = set()
_private: dict[int, os.stat_result] = {}
_mask = ctypes.create_string_buffer(128)  # a sigset_t: the signals that were blocked


def handle(number: int, handler: Handler) -> Any:
    """Let a signal call `handler` here and not in forks; return what it did before."""
    _watch_forks()
    previous = signal.signal(number, handler)
    _ours.add(handler)
    if previous not in _ours:
        _before[number] = signal.SIG_DFL if previous is None else previous
    return previous


def give_back(previous: Mapping[signal.Signals, Any], handler: Handler) -> None:
    """Let signals do again what they did before `handle` gave them to a handler."""
    for number, before in previous.items():
        signal.signal(number, before)
    _ours.discard(handler)


@contextmanager
def wakeup(descriptor: int) -> Iterator[None]:
    """Let the signals of this process, but not of its forks, be written to a descriptor."""
    previous = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    _wakeups.add(descriptor)
    keep_private(descriptor)  # who reads it waits for its end
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        _wakeups.discard(descriptor)


def keep_private(descriptor: int) -> None:
    """Let forks of this process lose an open file. It may be closed without a word to us."""
    _private[descriptor] = os.fstat(descriptor)


@contextmanager
def forks_end_here() -> Iterator[None]:
    """Let what a fork of the user's code raises end the fork, as if this process had no more to do.

    Else the fork would go on as this process does after an error: save, and end the run.
    """
    own = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == own:
            raise
        code = (error.code or 0) if isinstance(error, SystemExit) else None
        try:
            if not isinstance(code, int):
                traceback.print_exception(error)
            sys.stdout.flush()
        finally:  # also if nobody reads its output any more
            os._exit(code if isinstance(code, int) else 1)


@contextmanager
def job_signals_blocked() -> Iterator[None]:
    """Block the signals of the job in this thread; a program that is started here inherits that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(
    command: Sequence[str], *, timeout: float | None = None, input: Any = None, **options: Any
) -> "subprocess.CompletedProcess[Any]":
    """Run a program to its end, as `subprocess.run` does, without the signals of the job.

    This process still hears them. Without `input` the program reads an empty standard input.
    """
    given = subprocess.DEVNULL if input is None else subprocess.PIPE
    pipes = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with job_signals_blocked():
        process = subprocess.Popen(command, **pipes)
    with process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:  # it is late, or Ctrl-C
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def at_end_of_parent(number: int) -> None:
    """Let the kernel send this process a signal when the thread that started it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


@cache
def _watch_forks() -> None:
    """Register what happens at a fork, after nearly all modules have registered theirs."""
    # This is no Python function: the signals that have waited would call their handlers in it, and
    # Python drops what is raised there, such as KeyboardInterrupt.
    unblock = partial(ctypes.CDLL(None).pthread_sigmask, signal.SIG_SETMASK, _mask, None)
    os.register_at_fork(before=_before_fork, after_in_parent=unblock, after_in_child=_in_fork)
    os.register_at_fork(after_in_child=unblock)


def _before_fork() -> None:
    ctypes.CDLL(None).pthread_sigmask(signal.SIG_BLOCK, None, _mask)  # it reads the mask
    signal.pthread_sigmask(signal.SIG_BLOCK, _before.keys())


def _in_fork() -> None:
    for number, handler in _before.items():
        if signal.getsignal(number) in _ours:
            signal.signal(number, handler)
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor not in _wakeups and descriptor != -1:  # the user's own
        signal.set_wakeup_fd(descriptor)


def _drop_private() -> None:
    """Put /dev/null in the place of the private files; objects of Python may still close them."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, known in _private.items():
        with suppress(OSError):  # closed
            # The number may be that of another file by now.
            if os.path.samestat(os.fstat(descriptor), known):
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _private.clear()


class PerProcess:
    """An object whose attributes OWN `_begin` sets, anew in a fork and in a pickled copy.

    They are locks, threads and open files, for example. A forked child must not use its parent's: a
    thread that the child does not have may hold a lock. A pickled copy cannot take them along.
    """

    OWN: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        _OBJECTS.add(self)
        self._begin()

    def _begin(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in self.OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        PerProcess.__init__(self)


_OBJECTS: weakref.WeakSet[PerProcess] = weakref.WeakSet()


def _after_fork() -> None:
    if _private:
        _drop_private()
    for each in [*_OBJECTS]:
        each._begin()


os.register_at_fork(after_in_child=_after_fork)
