"""Worker processes that do numbered tasks, and never outlive this one.

Each is told one task after the other over a pipe, and answers with progress and with the result.
They never see Ctrl-C, which is this process's matter, and die with it, even when it is killed.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from hpctrain.errors import HpctrainError, StorageError

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
MAPPED_BYTES, SPARE_BYTES = 2**25, 2**30
EVERY_S = 0.1  # between two messages of a worker's progress

Task = Callable[[int, Callable[[int, int], None]], Any]  # (number, progress) -> result
"""Picklable; `progress(samples, bytes)`."""


def run(
    task: Task, numbers: Iterable[int], workers: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[int, Any]]:
    """Do `task(number)` for each of `numbers`, on so many processes; yield as they are done.

    Raises:
        HpctrainError: What a task raised; of several the first that is heard of. The others are
            ended.
        StorageError: A worker process died.
    """
    waiting = list(numbers)
    if workers == 1 or len(waiting) < 2:
        keep_memory()
        for number in waiting:
            yield number, task(number, progress)
        return
    waiting.reverse()
    pool: list[_Worker] = []
    try:
        with _without_interrupts():
            pool = [_Worker(task) for _ in range(min(workers, len(waiting)))]
        for worker in pool:
            worker.begin(waiting.pop())
        while busy := {worker.pipe: worker for worker in pool if worker.busy is not None}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                kind, content = worker.answer()
                if kind == "progress":
                    progress(*content)
                elif kind == "error":
                    raise content
                else:
                    done, worker.busy = worker.busy, None
                    assert done is not None
                    if waiting:
                        worker.begin(waiting.pop())
                    yield done, content
    finally:
        for worker in pool:
            worker.end()


def keep_memory() -> None:
    """Have malloc keep what is freed, for what comes next; glibc's, any other stays as it is.

    Blocks of some MB come and go all the time. As they are, they go back to the system, which
    clears their pages each time anew: a tenth of what it takes to decode images.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, SPARE_BYTES)


class _Worker:
    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.busy: int | None = None
        self._process = context.Process(target=_work, args=(task, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, number: int) -> None:
        self.busy = number
        with suppress(BrokenPipeError):  # it died: `answer` says so
            self.pipe.send(number)

    def answer(self) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            hint = " (out of memory? --workers takes fewer)" if why == "SIGKILL" else ""
            return "error", StorageError(
                f"a worker process died at piece {self.busy}: {why}{hint}; the same command goes on"
            )
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started here never see Ctrl-C; for this one it comes afterwards."""
    resource_tracker.ensure_running()  # it would change the mask when the first process starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Told:
    """Passes progress on, now and then: a piece may have a million blocks."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._samples, self._bytes = pipe, 0, 0
        self._last = time.monotonic()

    def __call__(self, samples: int, nbytes: int) -> None:
        self._samples += samples
        self._bytes += nbytes
        if time.monotonic() - self._last >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        self._pipe.send(("progress", (self._samples, self._bytes)))
        self._samples, self._bytes, self._last = 0, 0, time.monotonic()


def _work(task: Task, pipe: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked to take this one along
        return
    keep_memory()
    told = _Told(pipe)
    while True:
        try:
            number = pipe.recv()
        except EOFError:  # the parent is gone
            return
        answer: tuple[str, Any]
        try:
            answer = "done", task(number, told)
            told.flush()
        except Exception as error:
            answer = "error", error if isinstance(error, HpctrainError) else _bug(error)
        pipe.send(answer)


def _bug(error: Exception) -> Exception:
    """It keeps its traceback, and its type where that can be sent."""
    text = traceback.format_exc()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(text)
    return error
