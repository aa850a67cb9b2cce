"""Name the ranks that do not come to a collective operation, before the job ends because of them.

    a rank whose operation has timed out ── "tell" in the store ── every rank that can still answer
    each of these ── logs/collectives/rankN.json: its operations and stacks (`collectives.Record`)
    the ranks whose operations have failed ── read all records ── LateRankError

Nothing is done during a step. A thread of each rank waits for a key of the store, in C++ without
Python's lock. So a rank that sleeps, reads a file or waits for a lock still says where it is. A
rank that is stopped, or in C code that holds the lock, does not answer; the others name it.

The same thread notices when rank 0 has gone, or cannot be reached any more: on a node that Slurm
has lost, for example, a rank would wait for the others until `parallel.timeout_s`. It ends itself
after a minute (its lease).
"""

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed as dist

from hpctrain.disk import write_atomically
from hpctrain.errors import LateRankError
from hpctrain.faults.collectives import Record, conclude
from hpctrain.rendezvous.leaving import end_at_once
from hpctrain.rendezvous.port import keep_alive

log = logging.getLogger(__name__)
FOLDER = "collectives"  # in the folder of the logs
_LONGEST_ANSWER_S = 10.0
_ANNOUNCED_S = 5.0  # the end of a rank may be seen before the message that it was due to a timeout
_ARRIVES_S = 1.5
_TIMED_OUT = re.compile(r"gloo.*time(d )?out|(wait|socket) timeout", re.I | re.S)
_LOST = re.compile(r"gloo|connection|broken ?pipe|peer", re.I)
_FOR_EVER = timedelta(days=365)
_LEASE_S = 60.0  # for a rank whose rank 0 has gone; before, Linux has asked for a minute


class LateRanks:
    """A context manager that replaces the error of a collective by one that names the late ranks.

    With one rank nothing is done. `folder` is that of the run's logs, `store` that of the process
    group, `timeout_s` is `parallel.timeout_s`; `host` returns the node of a rank, or "", and
    `processes` the stacks of the processes that make the data. `port` is that of rank 0. The
    attribute `step` returns the number of global steps that were made.

    Raises:
        LateRankError: On exit, when a collective operation has timed out on any rank.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        timeout_s: float,
        host: Callable[[int], str] = lambda rank: "",
        processes: Callable[[], Mapping[str, str]] = dict,
        port: int = 0,
    ) -> None:
        self._folder, self._rank, self._ranks = folder / FOLDER, rank, world_size
        self._store = store if world_size > 1 else None
        self._timeout_s, self._host, self._processes = timeout_s, host, processes
        self._port, self._lock = port, threading.Lock()
        self._told, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.step: Callable[[], int | None] = lambda: None

    def __enter__(self) -> Self:
        if self._store is not None:
            self._file(self._rank).unlink(missing_ok=True)  # of an earlier attempt
            # A connection of its own: the waiting occupies it.
            store = self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
            keep_alive(self._port)
            self._thread = threading.Thread(
                target=self._listen, args=(store,), name="hpctrain-late-ranks", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._store is None:
            return
        self._error = error  # the thread may be the first to write
        try:
            if isinstance(error, RuntimeError) and self._is_due_to_timeout(str(error)):
                self._write()
                raise LateRankError(self._conclusion()) from error
        finally:
            self._close()

    def _listen(self, store: dist.Store) -> None:
        key = self._key(self._rank)
        try:
            store.wait([key], _FOR_EVER)
            told = store.get(key) == b"tell"
        except RuntimeError:  # the store has ended with rank 0, or the network is gone
            if not self._closed.wait(_LEASE_S):
                end_at_once("rank 0 has ended or cannot be reached, so this rank ends, too")
            return
        if told:
            with suppress(OSError):  # the disk is full
                self._write()
                self._told.set()

    def _close(self) -> None:
        """End the thread: one that comes back while the interpreter ends would abort it."""
        assert self._store is not None
        self._closed.set()
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), "end")
        if self._thread is not None:
            self._thread.join(_ANNOUNCED_S)

    def _is_due_to_timeout(self, text: str) -> bool:
        """Return whether a collective has timed out, here or on the rank that has hung up."""
        if _TIMED_OUT.search(text):
            # Without a read: if the server of the store is stopped, it would never return.
            with suppress(RuntimeError):
                for rank in range(self._ranks):
                    assert self._store is not None
                    self._store.set(self._key(rank), "tell")
            return True
        return _LOST.search(text) is not None and self._told.wait(_ANNOUNCED_S)

    def _write(self) -> None:
        """Write the record of this rank, once: the first one is from the time of the waiting."""
        with self._lock:
            file = self._file(self._rank)
            if file.exists():
                return
            record = self._record()
            # An operation that has failed no longer waits, but its error may be on its way. What a
            # late rank enters after the first look does not count.
            end = time.monotonic() + _ARRIVES_S
            while record.waits_in is None and time.monotonic() < end:
                time.sleep(0.02)
                if self._error is not None:
                    later = self._record()
                    record = later if later.entered == record.entered else record
                    break
            self._folder.mkdir(exist_ok=True)
            write_atomically(file, record.text(), sync=False)

    def _record(self) -> Record:
        known = self._rank, socket.gethostname(), self.step(), self._error
        return Record.of_this_process(*known, self._processes)

    def _conclusion(self) -> str:
        """Wait for the records of the ranks that can answer, and return what they say together."""
        end = time.monotonic() + min(_LONGEST_ANSWER_S, self._timeout_s)
        records: dict[int, Record] = {}
        while len(records) < self._ranks:
            for rank in range(self._ranks):
                if rank not in records and (record := Record.read(self._file(rank))) is not None:
                    records[rank] = record
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        hosts = {rank: self._host(rank) for rank in range(self._ranks)}
        hosts |= {rank: record.host for rank, record in records.items()}
        said = conclude(records, hosts, self._rank)
        return (
            f"{said} (parallel.timeout_s={self._timeout_s:g}; stacks of the ranks: {self._folder})"
        )

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    def _key(self, rank: int) -> str:
        return f"late_ranks/{rank}"
