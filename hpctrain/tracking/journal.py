"""The journal: one append-only file with all params, metrics, tags and states of a run.

    <run_dir>/journal/events.jsonl
    {"kind":"metrics","attempt":1,"time":1.7e9,"step":1,"metrics":{"loss":2.3,"grad_norm":"nan"}}
    ...                               one record a line: `journal_line` has all kinds

Rank 0 is the only writer. It writes each record with one `os.write` on an O_APPEND descriptor.

A *position* is a byte position in this file. The position of a record's first byte identifies the
record. A checkpoint stores a position, and so does the MLflow run: everything before that one has
been uploaded.

The file is never truncated. After a resume, the metrics between the checkpoint's position and the
end are superseded; a `superseded` record says so. A crash can leave an incomplete last line. The
next start ends this line with a newline, and readers skip it.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hpctrain.base.errors import StorageError
from hpctrain.base.files import record as door
from hpctrain.base.files.disk import open_below, open_regular
from hpctrain.tracking.journal_line import Outline, outline_all, parse, parse_all

log = logging.getLogger(__name__)

_TAIL, _BLOCK = 64 * 1024, 1 << 20  # bytes
_CHECK_S = 1.0
# With these options, json.dumps would make an encoder for each record: about 1 us of 11 us.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def journal_path(run_dir: Path) -> Path:
    """Return the path of the journal in a run directory."""
    return run_dir / "journal" / "events.jsonl"


class JournalRecord(NamedTuple):
    """One line of the journal."""

    start: int  # position of the first byte
    end: int  # position after the newline
    body: dict[str, Any]


class Journal:
    """The writer of a journal, which makes the folder `journal/` of the run.

    A background thread calls fsync on new records after `fsync_every` seconds. `attempt` is the
    number of this attempt: one more than the last one in the journal. `check` is called before a
    record is written, once a second at most, and ends the process if it may no longer write.
    """

    def __init__(
        self, run_dir: Path, fsync_every: float = 10.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check, self._checked = check, time.monotonic()
        self.path = journal_path(run_dir)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_below(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 2, 0o644)
        except OSError as error:
            raise StorageError(f"{self.path}: the journal cannot be opened: {error}") from error
        size = os.fstat(self._fd).st_size
        self._unwritten = b""  # records that a full disk has refused so far
        self._write_failed = False
        self._lock = threading.Lock()
        self._dirty = False
        self._closed = threading.Event()
        newest = _last(self._fd, size, "attempt") if size else None
        self.attempt = int(newest["attempt"]) + 1 if newest else 1
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        os.lseek(self._fd, 0, os.SEEK_END)
        self._timer = threading.Thread(
            target=self._sync_on_timer, args=(fsync_every,), name="journal-fsync", daemon=True
        )
        self._timer.start()

    @property
    def position(self) -> int:
        """The position where the next record will begin. Call `sync` before you store it."""
        with self._lock:
            # An O_APPEND write moves the descriptor to the end of the bytes it wrote.
            return os.lseek(self._fd, 0, os.SEEK_CUR) + len(self._unwritten)

    def append(self, kind: str, **fields: Any) -> None:
        """Append one record, whose fields are JSON types; floats are finite (`encode`).

        A disk that is full or gone does not stop the training: the record is kept in memory and
        written before the next record, once writing works again.
        """
        body = {"kind": kind, "attempt": self.attempt, "time": round(time.time(), 3), **fields}
        content = _ENCODER.encode(body).encode() + b"\n"
        with self._lock:
            if self._fd < 0:
                log.error("%s: a %s record after the end is dropped", self.path, kind)
                return
            self._unwritten += content
            if time.monotonic() - self._checked > _CHECK_S:
                self._check()
                self._checked = time.monotonic()
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(self._fd, self._unwritten) :]
                self._write_failed = False
            except OSError as error:
                if not self._write_failed:
                    log.error("%s: %s; metrics wait in memory", self.path, error)
                self._write_failed = True
            self._dirty = True

    def rewind(self, position: int) -> None:
        """Record that this attempt supersedes the metrics from `position` to the end."""
        end = self.position
        if position > end:
            # A node died between two fsyncs: the last bytes that the checkpoint knew are lost.
            log.warning("%s ends at %d, before position %d", self.path, end, position)
        elif position < end:
            self.append("superseded", **{"from": position, "to": end})

    def sync(self) -> None:
        """Call fsync: after this everything appended so far is on the disk."""
        with self._lock:
            self._dirty = False
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            log.error("%s: fsync: %s", self.path, error)

    def close(self) -> None:
        """Call fsync and close the file. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._timer.join()
        self.sync()
        with self._lock:
            # The system gives this descriptor's number to the next file that is opened: a late
            # `append` must fail, not write into that file.
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._unwritten:
            log.error("%s: %d bytes could not be written", self.path, len(self._unwritten))

    def _sync_on_timer(self, every: float) -> None:
        # In a thread, because an fsync can take a second on a busy parallel file system.
        while not self._closed.wait(every):
            if self._dirty:
                self.sync()


def read(path: Path, position: int = 0, limit: int = _BLOCK) -> tuple[list[JournalRecord], int]:
    """Read whole, valid records from `position` on, until one ends `limit` bytes after it.

    The second result is the position where the next call shall continue. It is before a last line
    without a newline: its writer may not have finished.
    """
    lines, ends = _lines(path, position, limit)
    found = zip(ends, ends[1:], parse_all(lines), strict=False)
    return [
        JournalRecord(start, end, body) for start, end, body in found if body is not None
    ], ends[-1]


def outlines(path: Path) -> Iterator[tuple[int, int, Outline]]:
    """Yield where each record begins and ends, and its outline: a fifth of the work of `read`."""
    position, size = 0, _BLOCK
    while size >= _BLOCK:  # else it was the end
        lines, ends = _lines(path, position)
        found = zip(ends, ends[1:], outline_all(lines), strict=False)
        yield from ((start, end, body) for start, end, body in found if body is not None)
        position, size = ends[-1], ends[-1] - position


def _lines(path: Path, position: int, limit: int = _BLOCK) -> tuple[list[bytes], list[int]]:
    """Return whole lines from a position on, and where each begins and the last one ends."""
    lines, ends = [], [position]
    if (file := _open(path)) is None:
        return [], ends
    with file:
        file.seek(position)
        stop = position + limit
        for each, size in door.lines(file, path):
            if not each.endswith(b"\n"):
                break
            lines.append(each)
            ends.append(ends[-1] + size)
            if ends[-1] >= stop:
                break
    return lines, ends


def read_all(path: Path, position: int = 0, end: int | None = None) -> Iterator[JournalRecord]:
    """Yield every record from `position` on that begins before the position `end`."""
    while True:
        records, following = read(path, position)
        for record in records:
            if end is not None and record.start >= end:
                return
            yield record
        if following == position or (end is not None and following >= end):
            return
        position = following


def last_step(path: Path) -> int:
    """Return the step of the last metrics; 0 if there are none."""
    return int((last_record(path, "step") or {"step": 0})["step"])


def last_record(path: Path, key: str) -> dict[str, Any] | None:
    """Return the last valid record that has this key; None if none has."""
    file = _open(path)
    if file is None:
        return None
    with file:
        return _last(file.fileno(), os.fstat(file.fileno()).st_size, key)


def _open(path: Path) -> BinaryIO | None:
    """Open a journal for reading; None if there is none, or if it cannot be read."""
    try:
        return open_regular(path, parts=2)
    except FileNotFoundError:
        return None
    except OSError as error:
        door.say(f"{path}: it cannot be read ({error.strerror}); it is left out")
        return None


def _last(fd: int, size: int, key: str) -> dict[str, Any] | None:
    # The rest is of a line that begins before what was read, or of one that is no record.
    end, window, rest = size, _TAIL, b""
    while end:
        begin = max(0, end - window)
        if len(rest) > door.LONGEST_LINE:
            rest = b"\0"
        if door.next_data(fd, begin) < end:
            rest, *lines = (os.pread(fd, end - begin, begin) + rest).split(b"\n")
        else:  # a hole
            rest, lines = b"\0", []
        for text in (*reversed(lines), *([rest] if begin == 0 else [])):
            body = parse(text) if text else None
            if body is not None and key in body:
                return body
        end, window = begin, min(8 * window, door.LONGEST_LINE)
    return None
