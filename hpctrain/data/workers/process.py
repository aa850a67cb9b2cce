"""One worker process: it takes a batch in shared memory, transforms it and answers where it lies.

It imports numpy and what the transform needs, not torch. It ignores the signals of the job. It ends
with its parent: when idle, because the socket closes; during a transform, because the kernel kills
it.
"""

import faulthandler
import mmap
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from multiprocessing import spawn
from typing import NamedTuple

import numpy as np

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.forks import JOB_SIGNALS, die_with
from hpctrain.data.workers.samples import SampleRandom, Transform, apply
from hpctrain.data.workers.shared import Packed, Segment

STACKS = signal.SIGURG  # asks a worker where it is; a process that does not know it ignores it
MESSAGE = 64 * 1024  # bytes of the longest message
VARIABLE = "HPCTRAIN_DATA_WORKER"  # in the environment of a worker


class BatchTask(NamedTuple):
    """A batch to transform, whose arrays lie in a segment; a new one comes with it."""

    number: int
    segment: int
    packed: Packed  # key, positions, indices and rows: see `samples.apply`


class Reply(NamedTuple):
    """The result of task `number`, in its segment, or what the transform raised.

    An exception is pickled, and its traceback is text.
    """

    number: int
    result: Packed | tuple[bytes, str]


def main(connection: int, payload: int, stacks: int, parent: int) -> None:
    """Serve until the parent closes the connection."""
    faulthandler.register(STACKS, stacks)  # in C, so it works while C code holds Python's lock
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)  # blocked for the start
    die_with(parent)
    channel = socket.socket(fileno=connection)
    segments: dict[int, Segment] = {}
    draws = AllRandom()
    transform: Transform | Exception
    try:
        transform = _load(payload)
    except Exception as error:
        transform = error
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE, 1)
        if not message:
            return
        task: BatchTask = pickle.loads(message)
        if descriptors:
            segments[task.segment] = Segment(descriptors[0])
        reply = _answer(task, segments[task.segment], transform, draws)
        try:
            channel.send(pickle.dumps(reply))
        except OSError:  # the parent is gone
            return


def _answer(
    task: BatchTask, segment: Segment, transform: Transform | Exception, draws: SampleRandom
) -> Reply:
    try:
        if isinstance(transform, Exception):
            raise transform
        key, positions, indices, rows = segment.unpack(task.packed)
        result = apply(transform, rows, key, positions, indices, draws)
        return Reply(task.number, segment.pack(result))
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        return Reply(task.number, _pickled(error))


class AllRandom(SampleRandom):
    """Sets the global generators, too, from which nothing else in this process draws."""

    def at(self, seed: int, epoch: int, position: int) -> np.random.Generator:
        """See `SampleRandom`."""
        number = hash((seed, epoch, position)) % 2**32  # of integers it is the same everywhere
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        if torch := sys.modules.get("torch"):
            torch.default_generator.manual_seed(number)
        return super().at(seed, epoch, position)


def _load(payload: int) -> Transform:
    """Unpickle the transform, after importing the trainer's main script if it is needed."""
    size = os.fstat(payload).st_size
    with mmap.mmap(payload, size, access=mmap.ACCESS_READ) as content:
        os.close(payload)
        preparation, transform = pickle.loads(content)
    spawn.prepare(preparation)
    try:
        return pickle.loads(transform)  # type: ignore[no-any-return]
    except AttributeError as error:
        raise ConfigError(
            f"a worker process cannot find the transform: {error}. What is defined in a notebook "
            "or an interactive session must move into a file that can be imported"
        ) from None


def _pickled(error: BaseException) -> tuple[bytes, str]:
    """Return the pickled exception (empty if that fails) and the end of its traceback."""
    text = "".join(traceback.format_exception(error))[-MESSAGE // 16 :]
    if not isinstance(error, ConfigError | DataError):
        error.add_note(f"\nIn worker process {os.getpid()}:\n{text}")
    try:
        content = pickle.dumps(error)
    except Exception:  # pickling can raise anything
        content = b""
    return content if len(content) < MESSAGE // 2 else b"", text
