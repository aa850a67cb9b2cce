"""The journal: one append-only file that holds everything a run has to say.

    <run_dir>/journal/events.jsonl
    {"kind":"status","attempt":1,"time":1.7e9,"status":"RUNNING","host":"n01","pid":71,"started":5}
    {"kind":"params","attempt":1,"time":1.7e9,"params":{"optimizer.lr":"0.1"}}
    {"kind":"metrics","attempt":1,"time":1.7e9,"step":1,"metrics":{"loss":2.3,"grad_norm":"nan"}}
    {"kind":"superseded","attempt":2,"time":1.7e9,"from":214,"to":307}

One writer, rank 0; one `os.write` per record on an O_APPEND descriptor. A record's
byte offset is its identity: a checkpoint stores it (`position`), the uploader's cursor is one.
Nothing is ever cut off. After a resume the metrics between the checkpoint's position and the end
are overtaken, and a `superseded` record says so. A line that a crash has torn is closed with a
newline at the next start, and readers skip it.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import StorageError

log = logging.getLogger(__name__)

_TAIL = 64 * 1024


def journal_path(run_dir: Path) -> Path:
    """The journal of the run in `run_dir`."""
    return run_dir / "journal" / "events.jsonl"


class Record(NamedTuple):
    """One line of the journal, with the bytes it occupies."""

    start: int
    end: int
    body: dict[str, Any]


class Journal:
    """The writer.

    Args:
        run_dir: The run's directory; `journal/` is made in it.
        fsync_every: A background thread brings records to the disk at least this often (seconds).

    Attributes:
        attempt: The number of this attempt at the run: one more than the journal has seen.
    """

    def __init__(self, run_dir: Path, fsync_every: float = 10.0) -> None:
        self.path = journal_path(run_dir)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise StorageError(f"{self.path}: the journal cannot be opened: {error}") from error
        size = os.fstat(self._fd).st_size
        self._waiting = b""  # what a full disk has refused so far
        self._refused = False
        self._lock = threading.Lock()
        self._dirty = False
        self._closed = threading.Event()
        self.attempt = _last_attempt(self._fd, size) + 1
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        os.lseek(self._fd, 0, os.SEEK_END)
        self._timer = threading.Thread(
            target=self._sync_on_timer, args=(fsync_every,), name="journal-fsync", daemon=True
        )
        self._timer.start()

    @property
    def position(self) -> int:
        """Where the next record will begin. A checkpoint stores it, after `sync`."""
        with self._lock:
            return self._end()

    def append(self, kind: str, at: float | None = None, **fields: Any) -> None:
        """Append one record.

        A disk that is full or gone does not stop the training: the record waits in memory and goes
        out with the next one that can be written.

        Args:
            kind: What it is: "metrics", "params", "tags", "status", "superseded".
            at: Its time in seconds since the epoch; now if not given.
            **fields: The rest, in JSON types; floats must be finite (see `encode`).
        """
        body = {
            "kind": kind,
            "attempt": self.attempt,
            "time": round(at or time.time(), 3),
            **fields,
        }
        line = json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._fd < 0:
                log.error("%s: a %s record after the end is dropped", self.path, kind)
                return
            self._waiting += line
            try:
                while self._waiting:
                    self._waiting = self._waiting[os.write(self._fd, self._waiting) :]
            except OSError as error:
                if not self._refused:
                    log.error(
                        "%s: %s; metrics wait in memory until it can be written", self.path, error
                    )
                self._refused = True
            else:
                self._refused = False
            self._dirty = True

    def rewind(self, position: int) -> None:
        """Mark the metrics from `position` to here as overtaken by the attempt that starts now."""
        end = self.position
        if position > end:
            # The checkpoint outlived the journal's last bytes: a node died between two fsyncs.
            log.warning("%s ends at %d, before position %d", self.path, end, position)
        elif position < end:
            self.append("superseded", **{"from": position, "to": end})

    def sync(self) -> None:
        """Return when everything appended so far is on the disk."""
        with self._lock:
            self._dirty = False
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            log.error("%s: fsync: %s", self.path, error)

    def close(self) -> None:
        """Sync and close."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._timer.join()
        self.sync()
        with self._lock:
            # A late writer must fail, not write into whatever file gets this number next.
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._waiting:
            log.error("%s: %d bytes could not be written", self.path, len(self._waiting))

    def _end(self) -> int:
        # After an O_APPEND write the descriptor stands at the end of what it wrote.
        return os.lseek(self._fd, 0, os.SEEK_CUR) + len(self._waiting)

    def _sync_on_timer(self, every: float) -> None:
        # A thread, because an fsync can take a second on a busy parallel file system.
        while not self._closed.wait(every):
            if self._dirty:
                self.sync()


def read(path: Path, offset: int = 0, limit: int = 1 << 20) -> tuple[list[Record], int]:
    """Read whole records from `offset` on.

    Args:
        path: The journal.
        offset: A record's start, or the offset that an earlier call returned.
        limit: About how many bytes to read at most; a longer record is still read whole.

    Returns:
        The records, without torn ones, and the offset to go on from. It stays before a last line
        that has no newline yet: its writer may be in the middle of it.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return [], offset
    records = []
    with file:
        file.seek(offset)
        stop = offset + limit
        for line in file:
            if not line.endswith(b"\n"):
                break
            start, offset = offset, offset + len(line)
            body = parse(line)
            if body is not None:
                records.append(Record(start, offset, body))
            if offset >= stop:
                break
    return records, offset


def read_all(path: Path, offset: int = 0, end: int | None = None) -> Iterator[Record]:
    """Every record from `offset` on that begins before `end`, a piece at a time."""
    while True:
        records, following = read(path, offset)
        for record in records:
            if end is not None and record.start >= end:
                return
            yield record
        if following == offset or (end is not None and following >= end):
            return
        offset = following


def parse(line: bytes) -> dict[str, Any] | None:
    """The record in `line`; None if it is torn."""
    try:
        body = json.loads(line)
    except ValueError:
        return None
    return body if isinstance(body, dict) and "kind" in body and "attempt" in body else None


def encode(value: float) -> float | str:
    """A float as JSON can hold it: JSON has no NaN and no infinity."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def decode(value: float | str) -> float:
    """The float that `encode` was given."""
    return float(value)


def _last_attempt(fd: int, size: int) -> int:
    """The attempt of the last whole record; 0 in an empty journal."""
    window = _TAIL
    while True:
        begin = max(0, size - window)
        lines = os.pread(fd, size - begin, begin).splitlines()
        for line in reversed(lines if begin == 0 else lines[1:]):
            body = parse(line)
            if body is not None:
                return int(body["attempt"])
        if begin == 0:
            return 0
        window *= 8
