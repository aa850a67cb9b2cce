"""`run_ranks(fn, n, *args)` calls a function on n gloo ranks and returns the results by rank.

The ranks are processes that wait for the next call, so that a call costs milliseconds. Each call
makes its own process group and destroys it. After a failure the processes are replaced. `fn` is a
function at the top of a module; `fn`, `args` and the results are pickled.
"""

import atexit
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import Any

from tests import bounds, forkserver

ROOT = Path(__file__).parents[1]
# After one rank has failed, the others have this number of seconds to end by themselves.
GRACE_S = 3
# After so many calls there are new processes. torch's caches keep the groups of earlier calls
# alive, with threads that wake up all the time, and clearing these caches can hang in torch.
RENEW = 75


class RanksError(AssertionError):
    """Some ranks have failed; the message has the traceback of each, or how its process ended."""


class _Rank:
    """A process that makes one call after the other."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socketpair()
        self.log = log
        with theirs, log.open("wb") as file:
            self.process = forkserver.Popen(
                [sys.executable, "-m", "tests.ranks"],
                cwd=ROOT,
                stdin=theirs,
                stdout=file,
                stderr=file,
            )
        self.process.lasting = True
        self.connection = Connection(ours.detach())

    def end(self) -> str:
        """Wait for the process; return its exit code and the last characters of its log as text."""
        code = self.process.wait()
        said = self.log.read_text(errors="replace")[-2000:]
        return f"the process ended with {code}\n{said}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class _Pool:
    """The ranks of this test run, and a folder for their logs and rendezvous files."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self.started = 0
        self.calls = 0
        self.age = 0  # the calls of the present processes
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def take(self, count: int) -> list[_Rank]:
        while len(self.ranks) < count:
            self.started += 1
            self.ranks.append(_Rank(self.folder / f"{self.started}.log"))
        return self.ranks[:count]

    @property
    def folder(self) -> Path:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="ranks-")
        return Path(self._folder.name)

    def replace(self) -> None:
        """End the processes; the next call starts new ones."""
        self.age = 0
        while self.ranks:
            self.ranks.pop().close()

    def close(self) -> None:
        self.replace()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


POOL = _Pool()
atexit.register(POOL.close)


def run_ranks(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `fn(*args)` on `n` ranks of a new process group.

    Returns:
        The results by rank.

    Raises:
        RanksError: A rank raised, ended, or did not answer in `timeout` seconds.
    """
    if POOL.age == RENEW:
        POOL.replace()
    POOL.calls += 1
    POOL.age += 1
    ranks = POOL.take(n)
    rendezvous = POOL.folder / f"{POOL.calls}.store"
    work = pickle.dumps((fn, args))
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    try:
        for number, rank in enumerate(ranks):
            place = (number, n, str(rendezvous), timeout)
            try:
                rank.connection.send((sys.path, dict(os.environ), os.getcwd(), place, work))
            except BrokenPipeError:  # the process has ended since the last call
                failures[number] = rank.end()
        end = time.monotonic() + timeout
        hurry = False
        while missing := {
            rank.connection: number
            for number, rank in enumerate(ranks)
            if number not in answers | failures
        }:
            if failures and not hurry:
                hurry, end = True, min(end, time.monotonic() + GRACE_S)
            if not (ready := wait(list(missing), max(end - time.monotonic(), 0))):
                words = "waited for the others" if hurry else f"no answer in {timeout} s"
                failures |= dict.fromkeys(missing.values(), words)
            for connection in ready:
                number = missing[connection]  # type: ignore[index]
                try:
                    good, value = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    good, value = False, ranks[number].end()
                (answers if good else failures)[number] = value
    except BaseException:
        POOL.replace()
        raise
    finally:
        rendezvous.unlink(missing_ok=True)
    if failures:
        POOL.replace()
        told = (f"rank {number} of {n}: {failures[number]}" for number in sorted(failures))
        raise RanksError("\n".join(told))
    return [answers[number] for number in range(n)]


# The rest of this file runs in a rank.


def _call(place: tuple[int, int, str, float], work: bytes) -> Any:
    from datetime import timedelta

    import torch
    from torch import distributed

    number, count, rendezvous, timeout = place
    fn, args = pickle.loads(work)
    torch.manual_seed(0)
    store = distributed.FileStore(rendezvous, count)
    distributed.init_process_group(
        "gloo", store=store, rank=number, world_size=count, timeout=timedelta(seconds=timeout)
    )
    # If a rank ended before another one is connected, the other one would fail too.
    store.add("connected", 1)
    while store.add("connected", 0) < count:
        time.sleep(0.001)
    try:
        return fn(*args)
    finally:
        distributed.destroy_process_group()
        torch.set_default_dtype(torch.float32)  # precision=fp64 has another
        if "torch.distributed.tensor" in sys.modules:
            # Its cache has the names of these groups; the next call gives them to others.
            from torch.distributed.tensor import debug

            debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def main() -> None:
    """Make the calls that come through stdin, which is a socket."""
    bounds.install()
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    while True:
        try:
            path, env, folder, place, work = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        os.environ.clear()
        os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | env)
        os.chdir(folder)
        try:
            answer = pickle.dumps((True, _call(place, work)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


if __name__ == "__main__":
    main()
