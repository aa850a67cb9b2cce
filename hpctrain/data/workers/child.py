"""A worker process as the trainer sees it: start, connection, tasks and end."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import spawn
from typing import BinaryIO, NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.workers.process import STACKS, VARIABLE, BatchTask
from hpctrain.data.workers.samples import Transform
from hpctrain.data.workers.shared import Segment

Rows = dict[str, Array]

_ANSWERS_S = 1.0  # until a worker has written its stacks
# One thread per process, because there are many processes.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class PendingBatch(NamedTuple):
    """What the trainer stores about a task that a worker is processing."""

    segment: Segment
    future: "Future[Rows]"
    indices: Int64s


class WorkerChild:
    """One worker process, the trainer's end of its connection, and its tasks, the oldest first."""

    def __init__(self, number: int) -> None:
        self.number, self.tasks = number, dict[int, PendingBatch]()
        # This kind of socket keeps messages, and the descriptors sent with them, whole.
        self.socket, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._known: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._stacks = os.memfd_create("hpctrain-stacks")

    def start(self, payload: int) -> None:
        """Start the process. `payload` is a descriptor of the file with the transform."""
        descriptors = (self._far_end.fileno(), payload, self._stacks)
        code = "from hpctrain.data.workers.process import main; main({}, {}, {}, {})"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code.format(*descriptors, os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=os.environ | dict.fromkeys(_ONE_THREAD, "1") | {VARIABLE: "1", "PYTHONPATH": path},
        )
        self._far_end.close()

    def send(self, task: BatchTask, segment: Segment) -> None:
        """Send a task, with the descriptor of its segment if the process does not have it yet."""
        new = [] if segment in self._known else [segment.descriptor]
        self._known.add(segment)
        with suppress(OSError):  # the worker has died; the thread that reads from it says so
            socket.send_fds(self.socket, [pickle.dumps(task)], new)

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for it and close the connection."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        self._far_end.close()
        self.socket.close()
        os.close(self._stacks)

    def stacks(self) -> str:
        """Return the stacks of its threads, by `faulthandler`; "" if it does not answer."""
        assert self._process is not None
        text, end = b"", time.monotonic() + _ANSWERS_S
        with suppress(OSError):  # it ends meanwhile
            os.ftruncate(self._stacks, 0)
            os.lseek(self._stacks, 0, os.SEEK_SET)  # the process has the same place in the file
            self._process.send_signal(STACKS)
            # The main thread, which answers, is written last, line by line.
            while not text.endswith(b"in <module>\n") and time.monotonic() < end:
                time.sleep(0.01)
                text = os.pread(self._stacks, 2**20, 0).rstrip() + b"\n"
        return text.decode(errors="replace")

    @property
    def name(self) -> str:
        """The worker, for a message."""
        assert self._process is not None
        return f"worker {self.number} of the data (process {self._process.pid})"

    @property
    def samples(self) -> str:
        """The samples that it transforms; "" if it has nothing to do."""
        pending = next(iter([*self.tasks.values()]), None)  # another thread takes them away
        return f"samples {_listed(pending.indices)}" if pending else ""

    def describe_end(self) -> str:
        """Describe how the process ended, after its connection was closed, and in which samples."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited ({code})"
        what = f"transformed {self.samples}" if self.tasks else "had nothing to do"
        hint = "; was there too little memory for so many?" if code == -signal.SIGKILL else ""
        return f"{self.name} {how} while it {what}{hint}"


def pickled(transform: Transform) -> BinaryIO:
    """Return a file in memory with the transform and what a fresh process needs to import it."""
    try:
        content = pickle.dumps(transform)
    except Exception as error:  # PicklingError, AttributeError, TypeError or any other
        raise ConfigError(
            f"the transform {transform!r} cannot be sent to worker processes: {error}. Define it "
            "by name at the top of a module (no lambda, no function within a function); "
            "functools.partial of one, and objects of a class, are fine"
        ) from None
    preparation = spawn.get_preparation_data("hpctrain-data")
    for key in [*preparation]:  # the script is imported only if it defines the transform
        if key == "authkey" or (key.startswith("init_main") and b"__main__" not in content):
            del preparation[key]
    file = os.fdopen(os.memfd_create("hpctrain-transform"), "w+b")
    file.write(pickle.dumps((preparation, content)))
    file.flush()
    return file


def _listed(indices: Int64s) -> str:
    shown = ", ".join(map(str, indices[:5].tolist()))
    return shown + ", ..." * (len(indices) > 5)
