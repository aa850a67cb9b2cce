"""Python transforms of single samples, in worker processes that return whole batches.

    submit ── source.read ── shared memory ── worker ── the same memory ── arrays
              (caller's thread)               transform                    given back when dropped

The trainer reads, at the speed of memory and with the shards opened once, and workers only
transform: they hold no files and start in a tenth of a second. A message is a few hundred bytes
each way. A batch lies in a segment of shared memory (`hpctrain.data.shared`) which is used again
when the last array on it is gone; there are as many as the caller holds and has in flight.

    >>> with Workers(Reader(folder, "train"), transform, count=4) as workers:
    ...     future = workers.submit((seed, epoch), positions, order(epoch, positions))
    ...     batch = future.result()                     # {field: array (n, *shape)}

What `transform` is, and its random numbers, are in `hpctrain.data.samples`: the result is the
same for every number of workers. Keep two or three batches in flight for each worker. Very small
samples go better several batches at a time: submit their rows together and slice the result.

Workers are fresh processes (never forks of one with threads or CUDA). They ignore the signals of
the job and never outlive the trainer, whatever it dies of. The transform is pickled: define it in
a module, or in a script below whose `if __name__ == "__main__":` the training starts.
"""

import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from selectors import EVENT_READ, DefaultSelector
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.ragged import Array, Ragged
from hpctrain.data.samples import SampleRandom, Transform, apply
from hpctrain.data.shared import Block, Segment, place, view
from hpctrain.data.source import Source
from hpctrain.data.worker import JOB_SIGNALS, MESSAGE, VARIABLE, Reply, Task
from hpctrain.errors import ConfigError, DataError

Int64s = NDArray[np.int64]
Rows = dict[str, Array]

# One thread in each: the workers are the parallelism.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Workers:
    """`count` processes that apply `transform` to the samples of `source`.

    Threads may share it. Close it: until then its processes live.

    Args:
        source: Read in the threads that call `submit`.
        transform: See `hpctrain.data.samples`.
        count: Processes; 0 transforms in `submit` itself, where a debugger works.

    Attributes:
        count: Processes.

    Raises:
        ConfigError: A negative count, or a transform that cannot be pickled.
    """

    def __init__(self, source: Source, transform: Transform, count: int) -> None:
        if count < 0:
            raise ConfigError(f"workers {count}: it is the number of processes, 0 or more")
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
        self._workers: list[_Worker] = []
        if count:
            payload = _pickled(transform)
            self._workers = [_Worker(number) for number in range(count)]
            # The kernel kills a worker when the thread that started it ends: this one serves
            # until `close`.
            self._thread = threading.Thread(
                target=self._serve, args=(payload,), name="hpctrain-workers", daemon=True
            )
            self._thread.start()

    def submit(self, key: tuple[int, int], positions: Int64s, indices: Int64s) -> "Future[Rows]":
        """Read samples and have them transformed.

        Args:
            key: (seed, epoch): with the position, what a sample's random numbers depend on.
            positions: int64 (n,), n >= 1: where the samples stand in the epoch.
            indices: int64 (n,): which samples of the source these are.

        Returns:
            A future of {field: array (n, *shape)}. Drop the arrays, and the future, to have
            their memory used again. Its exception is that of the transform, with the sample and
            the worker's traceback as notes, or a DataError: the results of a batch are not
            alike, or a worker process was killed.

        Raises:
            DataError: The source cannot be read, or there is no memory.
        """
        future: Future[Rows] = Future()
        future.set_running_or_notify_cancel()  # it cannot be taken back
        if not self._workers:
            return self._transform_here(future, key, positions, indices)
        segment = self._take_segment()
        try:
            task = self._read(segment, key, positions, indices)
        except BaseException:
            self._free.put(segment)
            raise
        with self._lock:
            if self._failure is not None:
                raise DataError(self._failure)
            worker = min(self._workers, key=lambda worker: len(worker.tasks))
            worker.tasks[task.number] = _Batch(segment, future, indices)
        worker.send(task, segment)
        return future

    def close(self) -> None:
        """End the processes; batches that were handed out stay valid."""
        self._fail("the workers of the data are closed")
        if self._workers:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_segment(self) -> Segment:
        try:
            return self._free.get_nowait()
        except Empty:
            return Segment()

    def _read(
        self, segment: Segment, key: tuple[int, int], positions: Int64s, indices: Int64s
    ) -> Task:
        """Read samples into a segment: fields of fixed size to where they stay."""
        size = 0

        def add(dtype: str, shape: tuple[int, ...]) -> Block:
            nonlocal size
            block = place(dtype, shape, size)
            size = block.end
            return block

        where = add("int64", positions.shape), add("int64", indices.shape)
        fixed = {
            name: add(field.dtype, (len(positions), *field.shape))
            for name, field in self._source.fields.items()
            if not field.variable
        }
        self._reserve(segment, size)
        memory = segment.bytes()
        out = {name: view(memory, block) for name, block in fixed.items()}
        rows = self._source.read(indices, out)
        fields: dict[str, Block | tuple[Block, Block]] = {}
        copies = list(zip(where, (positions, indices), strict=True))
        for name, value in rows.items():
            if isinstance(value, Ragged):
                parts = value.values, value.offsets
                blocks = tuple(add(part.dtype.str, part.shape) for part in parts)
                copies.extend(zip(blocks, parts, strict=True))
                fields[name] = blocks[0], blocks[1]
            else:
                fields[name] = fixed[name]
                if value is not out[name]:
                    copies.append((fixed[name], value))
        self._reserve(segment, size)
        memory = segment.bytes()
        for block, array in copies:
            np.copyto(view(memory, block), array)
        return Task(next(self._numbers), id(segment), size, key, *where, fields)

    def _reserve(self, segment: Segment, size: int) -> None:
        try:
            segment.reserve(size)
        except OSError as error:
            raise DataError(
                f"there is no memory to share a batch of {size} bytes with a worker process: "
                f"{error.strerror}"
            ) from None

    def _transform_here(
        self, future: "Future[Rows]", key: tuple[int, int], positions: Int64s, indices: Int64s
    ) -> "Future[Rows]":
        rows = self._source.read(indices)
        result: Rows = {}

        def allocate(first: Mapping[str, Array]) -> Rows:
            for name, array in first.items():
                result[name] = np.empty((len(positions), *array.shape), array.dtype)
            return result

        try:
            apply(self._transform, rows, key, positions, indices, allocate, SampleRandom())
            future.set_result(result)
        except Exception as error:
            future.set_exception(error)
        return future

    # The thread: starts the processes and hears from them.

    def _serve(self, payload: BinaryIO) -> None:
        # The processes inherit the mask, so that no signal meets them before they ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            with payload:
                for worker in self._workers:
                    worker.start(payload.fileno())
            with DefaultSelector() as selector:
                for worker in self._workers:
                    selector.register(worker.socket, EVENT_READ, worker)
                while self._failure is None:
                    for key, _ in selector.select():
                        self._hear(key.data)
        except Exception as error:  # whatever it is, nobody may wait for ever
            self._fail(f"the worker processes of the data cannot be served: {error!r}")
        finally:
            for worker in self._workers:
                worker.end()

    def _hear(self, worker: "_Worker") -> None:
        """One message of a worker, or its end."""
        try:
            message = worker.socket.recv(MESSAGE)
        except ConnectionResetError:  # it was killed with messages unread
            message = b""
        if not message:
            self._fail(worker.obituary())
            return
        reply: Reply = pickle.loads(message)
        with self._lock:
            batch = worker.tasks.pop(reply.number, None)
        if batch is not None:
            self._deliver(batch, reply)

    def _deliver(self, batch: "_Batch", reply: Reply) -> None:
        if reply.error is not None:
            self._free.put(batch.segment)
            batch.future.set_exception(_exception(*reply.error))
            return
        try:
            batch.segment.reserve(reply.size)
        except OSError as error:
            batch.future.set_exception(DataError(f"a batch cannot be mapped: {error.strerror}"))
            return
        memory = batch.segment.bytes()
        # Views of views keep `memory` itself alive, so that its end is that of all of them.
        weakref.finalize(memory, self._free.put, batch.segment).atexit = False
        batch.future.set_result({name: view(memory, at) for name, at in reply.fields.items()})

    def _fail(self, reason: str) -> None:
        """End everything, the first reason counts; who waits, and who comes later, hears it."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            batches = [batch for worker in self._workers for batch in worker.tasks.values()]
        for worker in self._workers:
            worker.kill()
        for batch in batches:
            batch.future.set_exception(DataError(reason))


class _Batch(NamedTuple):
    """What the trainer knows of a task in flight."""

    segment: Segment
    future: "Future[Rows]"
    indices: Int64s


class _Worker:
    """One process, its end of the connection, and what it has to do, oldest first."""

    def __init__(self, number: int) -> None:
        self.number, self.tasks = number, dict[int, _Batch]()
        # Messages, with descriptors: neither split nor joined on the way.
        self.socket, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._known: weakref.WeakSet[Segment] = weakref.WeakSet()

    def start(self, payload: int) -> None:
        descriptors = (self._far_end.fileno(), payload)
        code = "from hpctrain.data.worker import main; main({}, {}, {})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code.format(*descriptors, os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1") | {VARIABLE: "1", "PYTHONPATH": path},
        )
        self._far_end.close()

    def send(self, task: Task, segment: Segment) -> None:
        new = [] if segment in self._known else [segment.descriptor]
        self._known.add(segment)
        with suppress(OSError):  # it has died: whoever listens to it says so
            socket.send_fds(self.socket, [pickle.dumps(task)], new)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Leave nothing of it."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        self._far_end.close()
        self.socket.close()

    def obituary(self) -> str:
        """Say how it ended, and over which samples; it has closed its end."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited ({code})"
        what = "had nothing to do"
        if self.tasks:
            what = f"transformed samples {_some(next(iter(self.tasks.values())).indices)}"
        hint = "; was there too little memory for so many?" if code == -signal.SIGKILL else ""
        return (
            f"worker {self.number} of the data (process {self._process.pid}) {how} while it "
            f"{what}{hint}"
        )


def _pickled(transform: Transform) -> BinaryIO:
    """A file in memory with the transform, and what a fresh process needs to import it.

    Raises:
        ConfigError: It cannot be pickled.
    """
    try:
        content = pickle.dumps(transform)
    except Exception as error:  # PicklingError, AttributeError, TypeError, the object's own
        raise ConfigError(
            f"the transform {transform!r} cannot be sent to worker processes: {error}. Define it "
            "by name at the top of a module (no lambda, no function within a function); "
            "functools.partial of one, and objects of a class, are fine"
        ) from None
    preparation: dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv}
    if b"__main__" in content:  # the script is imported only when the transform lies in it
        preparation |= _main()
    file = os.fdopen(os.memfd_create("hpctrain-transform"), "w+b")
    file.write(pickle.dumps((preparation, content)))
    file.flush()
    return file


def _main() -> dict[str, str]:
    """How a fresh process imports this one's script, for `multiprocessing.spawn.prepare`."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return {"init_main_from_name": main.__spec__.name}
    path = getattr(main, "__file__", None)  # none in an interactive session
    return {} if path is None else {"init_main_from_path": os.path.abspath(path)}


def _exception(error: bytes, text: str) -> BaseException:
    """What a transform raised; a RuntimeError where its class cannot be had here."""
    try:
        found = pickle.loads(error)
    except Exception:  # as many things as there are exceptions
        found = None
    if isinstance(found, BaseException):
        return found
    return RuntimeError(f"the transform failed in a worker process:\n{text}")


def _some(indices: Int64s) -> str:
    shown = ", ".join(map(str, indices[:5].tolist()))
    return shown + ", ..." * (len(indices) > 5)
