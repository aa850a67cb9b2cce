"""Worker processes that do numbered tasks and never outlive this process.

    run ──── numbers ────> worker processes: the part of a task that needs a processor
     └──── what is left ──> threads of this process: `finish`, the part that waits for the disk

While a task is being finished here, its worker process does the next one. Each worker process
writes its progress and the number of its task into memory that it shares with this process. Worker
processes never see Ctrl-C, which is handled here, and die with this process, even when it is
killed.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from hpctrain.base.errors import HpctrainError, StorageError
from hpctrain.base.forks import die_with

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
MAPPED_BYTES, SPARE_BYTES = 2**25, 2**30
EVERY_S = 0.1  # between two reports of the progress
# When this process is killed, multiprocessing's tracker removes its semaphores, and warns of them.
_NO_WARNING = "ignore:resource_tracker:UserWarning"

Progress = Callable[[int, int], None]
"""`progress(samples, bytes)` adds to what is done."""
Task = Callable[[int, Progress], Any]
"""Picklable: `task(number, progress)` returns what `finish` needs, picklable and small."""
Finish = Callable[[int, Any], Any]
"""`finish(number, returned)` does what is left of a task, and returns its result."""


def run(
    task: Task,
    numbers: Sequence[int],
    workers: int,
    progress: Progress,
    finish: Finish = lambda _, returned: returned,
) -> Iterator[tuple[int, Any]]:
    """Do the task of each number in worker processes, and yield (number, result) as they finish."""
    if workers > 1 and len(numbers) > 1:
        yield from _run_in_processes(task, numbers, min(workers, len(numbers)), progress, finish)
        return
    _keep_memory()
    for number in numbers:
        yield number, finish(number, task(number, progress))


def results(task: Task, count: int, workers: int, progress: Progress) -> list[Any]:
    """Do the tasks 0 to `count` - 1, and return their results in this order."""
    found = dict(run(task, range(count), workers, progress))
    return [found[number] for number in range(count)]


def _run_in_processes(
    task: Task, numbers: Sequence[int], workers: int, progress: Progress, finish: Finish
) -> Iterator[tuple[int, Any]]:
    if _NO_WARNING not in sys.warnoptions:
        sys.warnoptions.append(_NO_WARNING)  # the tracker starts with the first lock
    context = multiprocessing.get_context("spawn")
    slots = context.RawArray(_Slot, workers)
    # The task may be large. If it were an argument, each process would have to start and to read
    # it from a pipe before the next process could start.
    content = pickle.dumps(task)
    pickled = context.RawArray(ctypes.c_char, len(content))
    pickled.raw = content
    given = slots, context.Value("i", 0), pickled, os.getpid()
    pool = ProcessPoolExecutor(workers, context, _begin, given)
    threads = ThreadPoolExecutor(workers)
    waiting = list(reversed(numbers))
    computing: dict[Future[Any], int] = {}
    finishing: dict[Future[Any], int] = {}
    others, processes = set(multiprocessing.active_children()), set[BaseProcess]()
    reported = 0, 0
    try:
        while waiting or computing or finishing:
            # At most 2 * workers tasks are unfinished, so that the disk does not fall behind.
            room = min(workers, 2 * workers - len(finishing))
            while waiting and len(computing) < room:
                number = waiting.pop()
                with _without_interrupts():  # submitting may start a process
                    computing[pool.submit(_work, number)] = number
                    processes |= set(multiprocessing.active_children()) - others
            done, _ = wait([*computing, *finishing], EVERY_S, FIRST_COMPLETED)
            now = sum(slot.samples for slot in slots), sum(slot.bytes for slot in slots)
            if now != reported:
                progress(now[0] - reported[0], now[1] - reported[1])
                reported = now
            for future in done:
                if future in computing:
                    number = computing.pop(future)
                    finishing[threads.submit(finish, number, future.result())] = number
                else:
                    yield finishing.pop(future), future.result()
    except BrokenProcessPool:
        pool.shutdown()  # the other processes end, so that all exit codes are known
        raise _death(processes, {slot.pid: slot.number for slot in slots}) from None
    finally:
        for process in processes:
            process.kill()
        pool.shutdown()
        threads.shutdown(cancel_futures=True)


def _death(processes: set[BaseProcess], numbers: dict[int, int]) -> StorageError:
    """Return an error that names the process that died; the executor ends the others by SIGTERM."""
    dead = min(processes, key=lambda process: process.exitcode in (0, None, -signal.SIGTERM))
    code = dead.exitcode or 0
    why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    why += " (out of memory? --workers takes fewer)" * (why == "SIGKILL")
    where = f"at piece {numbers[dead.pid]}" if dead.pid in numbers else "at its start"
    return StorageError(f"a worker process died {where}: {why}; the same command goes on")


def _keep_memory() -> None:
    """Make malloc keep freed memory for later; only glibc's malloc can do that.

    Blocks of some MB come and go all the time. By default they go back to the system, which
    clears their pages each time anew: a tenth of the time that it takes to decode images.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, SPARE_BYTES)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT. Processes that start meanwhile never see it; this process sees it later."""
    resource_tracker.ensure_running()  # a later start would change the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Slot(ctypes.Structure):
    """The state of one worker process, which alone writes it; so it needs no lock."""

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("number", ctypes.c_int64),  # of the task that it is doing
        ("samples", ctypes.c_int64),  # all that it has done
        ("bytes", ctypes.c_int64),
    )


_slot: _Slot  # only a worker process has these two
_load_task: Callable[[], Task]


def _begin(slots: Any, started: Any, pickled: Any, parent: int) -> None:
    """Prepare a worker process."""
    global _slot, _load_task
    die_with(parent)
    _keep_memory()
    with started.get_lock():
        _slot = slots[started.value]
        started.value += 1
    _load_task = cache(lambda: pickle.loads(pickled.raw))


def _work(number: int) -> Any:
    """Do the first part of a task in a worker process."""
    _slot.number, _slot.pid = number, os.getpid()
    try:
        return _load_task()(number, _advance)
    except HpctrainError:
        raise
    except BaseException as error:  # a SystemExit too, which would end the parent silently
        sent = None
        with suppress(Exception):
            sent = pickle.loads(pickle.dumps(error))
        if isinstance(sent, Exception):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _advance(samples: int, nbytes: int) -> None:
    _slot.samples += samples
    _slot.bytes += nbytes
