"""What a converter reads: data with a schema, cut into pieces that can be read one by one.

A piece becomes shards of its own, no matter which process reads it and when. This makes a
conversion parallel, resumable, and the same for every number of workers. So `read` must depend on
the piece alone. A piece is best about as large as a shard.
"""

import os
import stat
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.writing.sample_schema import ArrayBatch
from hpctrain.base.errors import DataError
from hpctrain.base.files.disk import open_regular
from hpctrain.data.shards.field import Field

BLOCK_BYTES = 8 * 2**20  # roughly, of data that is read, checked and passed on at once


LARGEST = 2**30  # bytes of a file that is read at once, such as an index or a tokenizer


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Turn the system's errors into one that names the file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def content_of(path: Path | str) -> bytes:
    """Return the content of a file that the user has named; see `open_regular` and LARGEST."""
    with readable(path), open_regular(Path(path), 0) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise DataError(f"{path} has more than {LARGEST:,} bytes, the most of its kind")
    return content


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file with its size and time, as they were when the work was planned."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path | str) -> "SourceFile":
        """Return a file with its size and time; one that is not accessible is a DataError."""
        with readable(path):
            found = os.stat(path)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise DataError(f"{path} is no regular file")  # a pipe or a device might never end
        return cls(str(path), found.st_size, found.st_mtime_ns)

    def check(self) -> None:
        """Check that the file has not changed; one that was changed or removed is a DataError."""
        if SourceFile.of(self.path) != self:
            raise DataError(f"{self.path} was changed while it was being read; run this again")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source."""

    what: Any  # the argument of the source's `read`; small, because it is sent to another process
    files: Sequence[SourceFile] = ()  # the files that the piece is read from
    # Roughly the size of the data to be written; for the progress and to check that the disk has
    # enough room.
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Consecutive samples of a piece: at least one sample, a few MB in all."""

    # The values of each field: an array (n, *shape), or for a variable-length field a `Ragged` or n
    # arrays. The source must not write into them again.
    values: ArrayBatch
    # The keys that decide each sample's split; None: the content of all fields.
    keys: Sequence[bytes] | None = None
    # The values of `Options.column`, for `--split column:NAME` or `--group NAME`; None: it is the
    # name of a field.
    column: Sequence[str] | None = None
    file: str = ""  # the file that the samples come from, for `--split file:…`
    # Returns the name of a sample in messages, such as "line 17"; None: its number.
    records: Callable[[int], str] | None = None


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used."""

    file: str
    record: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.record, self.reason) if part)


class BadRecords:
    """Collects the records that a source cannot use; `on_error` is the option `--on-error`."""

    def __init__(self, on_error: str) -> None:
        self._on_error = on_error
        self.found: list[BadRecord] = []
        self.skipped: dict[str, int] = defaultdict(int)

    def bad(self, file: str, record: str, reason: str) -> None:
        """Report a record that is left out; with `--on-error stop` this is a DataError about it."""
        # No record of ours has NUL in a text.
        one = BadRecord(*(text.replace("\0", "\\0") for text in (file, record, reason)))
        if self._on_error == "stop":
            raise DataError(f"{one}; --on-error skip leaves such records out")
        self.found.append(one)

    def skip(self, reason: str) -> None:
        """Count a record that holds nothing, such as an empty document, and is left out."""
        self.skipped[reason] += 1

    def why(self) -> str:
        """Return the first record that was found as the end of a message, or ""."""
        return f": {self.found[0]}" if self.found else ""


@dataclass(frozen=True)
class InputSource(ABC):
    """Base class of the converters' sources. Sources are sent to worker processes by pickle."""

    name: str  # the name of the command
    fields: Mapping[str, Field]  # the schema
    pieces: Sequence[Piece]  # the pieces, in the order of the samples
    # Everything that the result depends on besides the files, the schema and the common options;
    # JSON.
    identity: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)  # entries for the provenance; JSON
    # For each field with named values, the names of the values 0, 1, ….
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # The columns that `--split column:NAME` and `--group NAME` may name.
    columns: Sequence[str] = ()
    # The folders that were searched for files: OUT must not be inside of them.
    folders: Sequence[str] = ()
    # File name to content of text files that are written beside the shards because a reader of the
    # data needs them, such as a tokenizer.
    beside: Mapping[str, str] = field(default_factory=dict)
    group: str = ""  # the field of which no value is in two splits, if that is known beforehand
    own: str = ""  # the column that names the splits unless --split is given, or ""

    def split_files(self) -> Iterable[str]:
        """Return all possible values of `SampleBlock.file`, to check `--split file:…` early."""
        return (file.path for piece in self.pieces for file in piece.files)

    @abstractmethod
    def read(self, what: Any, reading: BadRecords) -> Iterator[SampleBlock]:
        """Yield the samples of one piece, by its `what`; the same samples each time.

        Records that cannot be used are reported to `reading`. A file that cannot be read at all is
        a DataError.
        """
