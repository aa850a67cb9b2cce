"""Executors: threads that work ahead, or none, with the same interface."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def pool(threads: int) -> Executor:
    """Return an executor of so many threads, in each of which torch uses that thread only."""
    if not threads:
        return WhenAsked()
    executor = ThreadPoolExecutor(threads, "hpctrain-loader")
    intra_op, all_here = torch.get_num_threads(), Barrier(threads + 1)
    for _ in range(threads):
        executor.submit(_begin, all_here)
    try:
        all_here.wait()
    except BaseException:
        all_here.abort()
        raise
    torch.set_num_threads(intra_op)  # threads that start later begin with this number
    return executor


def _begin(all_here: Barrier) -> None:
    torch.set_num_threads(1)  # for this thread, but also for threads that start later
    all_here.wait()


class WhenAsked(Executor):
    """Runs a call when, and in the thread in which, its result is needed; otherwise never."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor`."""
        return _Later(lambda: fn(*args, **kwargs))


class _Later(Future[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._call())
        return super().result(timeout)
