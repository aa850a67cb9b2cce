"""Worker processes that do numbered tasks, and never outlive this one.

Each is told one task after the other over a pipe, and answers with progress and with the result.
They never see Ctrl-C, which is this process's matter, and die with it, even when it is killed.

A task has two parts: what needs the processor, and what then waits for the disk. The second runs
in a thread, while the process is at its next task.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from hpctrain.errors import HpctrainError, StorageError

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
MAPPED_BYTES, SPARE_BYTES = 2**25, 2**30
EVERY_S = 0.1  # between two messages of a worker's progress

Progress = Callable[[int, int], None]  # samples, bytes: more
Task = Callable[[int, Progress], Callable[[], Any]]
"""Picklable: `task(number, progress)` returns what is left to do, which returns the result."""


def run(
    task: Task, numbers: Iterable[int], workers: int, progress: Progress
) -> Iterator[tuple[int, Any]]:
    """Do the task of each of `numbers`, on so many processes; yield results as they are there.

    Raises:
        HpctrainError: What a task raised; of several the first that is heard of. The others are
            ended.
        StorageError: A worker process died.
    """
    waiting = list(numbers)
    if workers == 1 or len(waiting) < 2:
        yield from _run_here(task, waiting, progress)
        return
    waiting.reverse()
    pool: list[_Worker] = []
    try:
        with _without_interrupts():
            pool = [_Worker() for _ in range(min(workers, len(waiting)))]
        for worker in pool:  # all are there: a large task would keep the next from starting
            worker.send(task)
            worker.begin(waiting.pop())
        while busy := {worker.pipe: worker for worker in pool if worker.numbers}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                kind, content = worker.answer()
                if kind == "progress":
                    progress(*content)
                elif kind == "error":
                    raise content
                elif kind == "free":
                    if waiting:
                        worker.begin(waiting.pop())
                else:
                    worker.numbers.remove(content[0])
                    yield content
    finally:
        for worker in pool:
            worker.end()


def _run_here(task: Task, numbers: Iterable[int], progress: Progress) -> Iterator[tuple[int, Any]]:
    keep_memory()
    before: tuple[int, Future[Any]] | None = None
    with ThreadPoolExecutor(1) as thread:  # ends when what is left to do is done
        for number in numbers:
            left = task(number, progress)
            if before is not None:
                yield before[0], before[1].result()
            before = number, thread.submit(left)
        if before is not None:
            yield before[0], before[1].result()


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
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.numbers: list[int] = []  # of the tasks that it has not finished
        self._process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, number: int) -> None:
        self.numbers.append(number)
        self.send(number)

    def send(self, content: Any) -> None:
        with suppress(BrokenPipeError):  # it died: `answer` says so
            self.pipe.send(content)

    def answer(self) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            hint = " (out of memory? --workers takes fewer)" if why == "SIGKILL" else ""
            return "error", StorageError(
                f"a worker process died at piece {self.numbers[-1]}: {why}{hint}; the same command "
                "goes on"
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


class _Answers:
    """Of a worker's two threads; how far it is only now and then, for blocks may be many."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._samples, self._bytes = pipe, 0, 0
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self._pipe.send((kind, content))

    def progress(self, samples: int, nbytes: int) -> None:
        self._samples += samples
        self._bytes += nbytes
        if time.monotonic() - self._last >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        self.send("progress", (self._samples, self._bytes))
        self._samples, self._bytes, self._last = 0, 0, time.monotonic()

    def finish(self, number: int, left: Callable[[], Any]) -> None:
        """Do what is left of a task, and answer."""
        try:
            self.send("done", (number, left()))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self.send("error", error if isinstance(error, HpctrainError) else _bug(error))


def _work(pipe: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked to take this one along
        return
    keep_memory()
    answers = _Answers(pipe)
    task: Task = pipe.recv()
    with ThreadPoolExecutor(1) as thread:
        before: Future[None] | None = None
        while True:
            try:
                number = pipe.recv()
            except EOFError:  # the parent is gone
                return
            try:
                left = task(number, answers.progress)
                answers.flush()
            except Exception as error:
                answers.fail(error)
                continue
            if before is not None:
                before.result()  # one at a time: the disk is not to fall behind
            answers.send("free", None)
            before = thread.submit(answers.finish, number, left)


def _bug(error: Exception) -> Exception:
    """It keeps its traceback, and its type where that can be sent."""
    text = traceback.format_exc()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(text)
    return error
