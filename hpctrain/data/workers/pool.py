"""Apply Python transforms to single samples, in worker processes that return whole batches.

    submit ── source.read ── shared memory ── worker ── the same memory ── arrays
              (caller's thread)               transform                    freed when dropped

The trainer reads the samples, at memory speed and with every shard opened once. Workers only
transform: they open no shards and start in a tenth of a second. A message has a few hundred bytes
in each direction. A batch lies in a segment of shared memory (see `shared`), which is used again
when the last array in it is dropped.

    >>> with Workers(Reader(folder, "train"), transform, count=4) as workers:
    ...     future = workers.submit((seed, epoch), positions, order(epoch, positions))
    ...     batch = future.result()                     # {field: array (n, *shape)}

`samples` describes `transform` and its random numbers. The result is the same for every number of
workers. Keep two or three batches in flight per worker.

Workers are fresh processes, never forks of a process with threads or CUDA. They ignore the signals
of the job and never outlive the trainer, however it ends. The transform is pickled: define it in a
module, or in a script that starts the training below `if __name__ == "__main__":`.
"""

import itertools
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from typing import Any, BinaryIO, Self

import numpy as np

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.forks import JOB_SIGNALS
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Int64s
from hpctrain.data.source import Source
from hpctrain.data.workers.child import PendingBatch, Rows, WorkerChild, pickled
from hpctrain.data.workers.process import MESSAGE, VARIABLE, BatchTask, Reply
from hpctrain.data.workers.samples import Sample, SampleRandom, Transform, apply
from hpctrain.data.workers.shared import Packed, Segment

_pools: "weakref.WeakSet[Workers]" = weakref.WeakSet()


def stacks() -> dict[str, str]:
    """Return the stacks of the processes that transform samples now, by process and samples."""
    busy = [each for pool in [*_pools] for each in pool._workers if each.tasks]
    return {f"{each.name} with {each.samples}": each.stacks() for each in busy}


class Workers:
    """`count` processes that apply `transform` to the samples of `source`, until `close`.

    Threads may share it; the source is read in those that call `submit`. With a count of 0,
    `submit` itself transforms, so that a debugger works.
    """

    def __init__(self, source: Source, transform: Transform, count: int) -> None:
        if VARIABLE in os.environ:
            raise ConfigError(
                "a worker process has imported the script that starts the training: put what it "
                'does below `if __name__ == "__main__":`'
            )
        self.count = count
        self._source, self._transform = source, transform
        self._free: SimpleQueue[Segment] = SimpleQueue()
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._numbers = itertools.count()
        self._workers: list[WorkerChild] = []
        if count:
            payload = pickled(transform)
            self._workers = [WorkerChild(number) for number in range(count)]
            # The kernel kills a worker when the thread that started it ends, so this thread runs
            # until `close`. Wait until it has started the workers: `subprocess` learns through a
            # pipe that a process has started, and a fork in the meantime would keep it open.
            started = threading.Event()
            self._thread = threading.Thread(
                target=self._serve, args=(payload, started), name="hpctrain-workers", daemon=True
            )
            self._thread.start()
            started.wait()
            if self._failure is not None:
                raise DataError(self._failure)
            _pools.add(self)

    def submit(self, key: tuple[int, int], positions: Int64s, indices: Int64s) -> "Future[Rows]":
        """Read the samples `indices`, n >= 1, and let a worker transform them.

        A sample's random numbers depend on the key, (seed, epoch), and its position in the epoch.
        The future has {field: array (n, *shape)}. Its exception is that of the transform, with the
        sample and the worker's traceback as notes, or a DataError if the results differ in shape or
        a worker was killed.
        """
        future: Future[Rows] = Future()
        future.set_running_or_notify_cancel()  # a task that runs cannot be cancelled
        if not self._workers:
            return self._transform_here(future, key, positions, indices)
        rows = dict(self._source.read(indices))
        for name, value in rows.items():
            if not isinstance(value, Ragged):  # others would not fit into a message
                rows[name] = np.ascontiguousarray(value)
        given = np.ascontiguousarray(positions), np.ascontiguousarray(indices)
        try:
            segment = self._free.get_nowait()
        except Empty:
            segment = Segment()
        task = BatchTask(next(self._numbers), id(segment), segment.pack((key, *given, rows)))
        with self._lock:
            if self._failure is not None:
                raise DataError(self._failure)
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            worker.tasks[task.number] = PendingBatch(segment, future, indices)
        worker.send(task, segment)
        return future

    def close(self) -> None:
        """End the processes. Batches that were returned stay valid."""
        self._fail("the workers of the data are closed")
        if self._workers:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transform_here(
        self, future: "Future[Rows]", key: tuple[int, int], positions: Int64s, indices: Int64s
    ) -> "Future[Rows]":
        rows = self._source.read(indices)

        def transform(sample: Sample, random: np.random.Generator) -> Mapping[str, Any]:
            if self._failure is not None:  # a thread shall not go on after `close`
                raise DataError(self._failure)
            return self._transform(sample, random)

        try:
            future.set_result(apply(transform, rows, key, positions, indices, SampleRandom()))
        except Exception as error:
            future.set_exception(error)
        return future

    # The thread starts the processes and receives their messages.

    def _serve(self, payload: BinaryIO, started: threading.Event) -> None:
        # The processes inherit the mask, so no signal arrives before they ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            with payload:
                for worker in self._workers:
                    worker.start(payload.fileno())
            started.set()
            with DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.socket, EVENT_READ, worker)
                while self._failure is None:
                    for key, _ in selector.select():
                        self._receive(key.data)
        except Exception as error:  # any error, because nobody may wait for ever
            self._fail(f"the worker processes of the data cannot be started or heard: {error!r}")
        finally:
            started.set()
            for worker in self._workers:
                worker.end()

    def _receive(self, worker: "WorkerChild") -> None:
        """Handle one message of a worker, or its end."""
        try:
            message = worker.socket.recv(MESSAGE)
        except ConnectionResetError:  # the worker was killed before it read all messages
            message = b""
        if not message:
            self._fail(worker.describe_end())
            return
        reply: Reply = pickle.loads(message)
        with self._lock:
            batch = worker.tasks.pop(reply.number, None)
        if batch is None:
            return
        if isinstance(reply.result, Packed):
            batch.future.set_result(batch.segment.unpack(reply.result, self._free.put))
        else:
            self._free.put(batch.segment)
            batch.future.set_exception(_exception(*reply.result))

    def _fail(self, reason: str) -> None:
        """End all workers. All pending and later batches fail with the first `reason`."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            batches = [batch for worker in self._workers for batch in worker.tasks.values()]
        for worker in self._workers:
            worker.kill()
        for batch in batches:
            batch.future.set_exception(DataError(reason))


def _exception(error: bytes, text: str) -> BaseException:
    """Return what a transform raised; a RuntimeError if its class cannot be imported here."""
    try:
        found = pickle.loads(error)
    except Exception:  # unpickling can raise anything
        found = None
    if isinstance(found, BaseException):
        return found
    return RuntimeError(f"the transform failed in a worker process:\n{text}")
