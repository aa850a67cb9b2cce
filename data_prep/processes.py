"""Worker processes that do numbered tasks, and never outlive this one.

Each is told one task after the other over a pipe, and answers with progress and with the result.
They ignore Ctrl-C, which is this process's matter, and die with it, even when it is killed.
"""

import ctypes
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from hpctrain.errors import HpctrainError, StorageError

PR_SET_PDEATHSIG = 1

Task = Callable[[int, Callable[[int, int], None]], Any]  # (number, progress) -> result
"""Picklable; `progress(samples, bytes)`."""


def run(
    task: Task, numbers: Iterable[int], workers: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[int, Any]]:
    """Do `task(number)` for each of `numbers`, on so many processes; yield as they are done.

    Raises:
        HpctrainError: What a task raised; of several the first that is heard of. The others are
            ended.
    """
    waiting = list(numbers)
    if workers == 1 or len(waiting) < 2:
        for number in waiting:
            yield number, task(number, progress)
        return
    pool = [_Worker(task) for _ in range(min(workers, len(waiting)))]
    waiting.reverse()
    try:
        for worker in pool:
            worker.begin(waiting.pop())
        while any(worker.busy is not None for worker in pool):
            ready = wait([worker.pipe for worker in pool if worker.busy is not None])
            for worker in pool:
                if worker.pipe not in ready:
                    continue
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


class _Worker:
    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.busy: int | None = None
        self._process = context.Process(target=_work, args=(task, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, number: int) -> None:
        self.busy = number
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


def _work(task: Task, pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            number = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            answer = "done", task(number, lambda *more: pipe.send(("progress", more)))
        except Exception as error:
            if not isinstance(error, HpctrainError):
                import traceback

                error.add_note(traceback.format_exc())  # a bug keeps its traceback
            answer = "error", error
        pipe.send(answer)
