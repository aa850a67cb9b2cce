"""What a converter reads: data with a schema, cut into pieces that can be read one by one.

A piece becomes shards of its own, no matter which process reads it and when. This makes a
conversion parallel, resumable, and the same for every number of workers. So `read` must depend on
the piece alone. A piece is best about as large as a shard.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from hpctrain.errors import DataError
from hpctrain.shards.field import Field
from hpctrain.shards.sample_schema import ArrayBatch

BLOCK_BYTES = 8 * 2**20  # roughly, of data that is read, checked and passed on at once


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Turn the system's errors into one that names the file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file with its size and time, as they were when the work was planned."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path | str) -> "SourceFile":
        """Return a file with its size and time.

        Raises:
            DataError: The file does not exist or is not accessible.
        """
        with readable(path):
            found = os.stat(path)
        return cls(str(path), found.st_size, found.st_mtime_ns)

    def check(self) -> None:
        """Check that the file has not changed.

        Raises:
            DataError: The file was changed or removed.
        """
        if SourceFile.of(self.path) != self:
            raise DataError(f"{self.path} was changed while it was being read; run this again")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source.

    Attributes:
        what: The argument of the source's `read`; small, because it is sent to another process.
        files: The files that the piece is read from.
        samples: The number of samples, if it is known beforehand; for the progress.
        bytes: Roughly the size of the data to be written; for the progress and to check that
            the disk has enough room.
    """

    what: Any
    files: Sequence[SourceFile] = ()
    samples: int | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive samples of a piece: at least one sample, a few MB in all.

    Attributes:
        values: The values of each field: an array (n, *shape), or for a variable-length field a
            `Ragged` or n arrays. The source must not write into them again.
        keys: The keys that decide each sample's split; None: the content of all fields.
        column: The values of `Options.column`, for `--split column:NAME` or `--group NAME`.
        file: The file that the samples come from, for `--split file:…`.
        records: The name of each sample in messages, such as "line 17"; None: its number.
    """

    values: ArrayBatch
    keys: Sequence[bytes] | None = None
    column: Sequence[str] | None = None
    file: str = ""
    records: Sequence[str] | None = None


class Names(Sequence[str]):
    """The names of samples in messages, each made only when it is read.

    Args:
        count: The number of samples.
        name: Returns the name of a sample by its number, from 0.
    """

    def __init__(self, count: int, name: Callable[[int], str]) -> None:
        self._count, self._name = count, name

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, sample: Any) -> Any:
        return self._name(int(sample))


@runtime_checkable
class BadRecords(Protocol):
    """The receiver of reports about records that a source cannot use."""

    def bad(self, file: str, record: str, reason: str) -> None:
        """Report a record that cannot be used and is left out.

        Raises:
            DataError: `--on-error` is "stop". The message has the file, the record and the reason.
        """

    def skip(self, reason: str) -> None:
        """Count a record that holds nothing, such as an empty document, and is left out."""


@dataclass(frozen=True)
class Source(ABC):
    """Base class of the converters' sources. Sources are sent to worker processes by pickle.

    Attributes:
        name: The name of the command.
        fields: The schema.
        pieces: The pieces, in the order of the samples.
        identity: Everything that the result depends on besides the files, the schema and the
            common options; JSON.
        about: Entries for the provenance; JSON.
        categories: For each field with named values, the names of the values 0, 1, ….
        columns: The columns that `--split column:NAME` and `--group NAME` may name.
        folders: The folders that were searched for files: OUT must not be inside of them.
        beside: File name to content of text files that are written beside the shards because a
            reader of the data needs them, such as a tokenizer.
        group: The field of which no value is in two splits, if that is known beforehand.
        own: The column that names the splits unless --split is given, or "".
        unpacks: Whether all samples come out of the pieces' files, whose sizes then bound them.
    """

    unpacks: ClassVar[bool] = True
    name: str
    fields: Mapping[str, Field]
    pieces: Sequence[Piece]
    identity: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    columns: Sequence[str] = ()
    folders: Sequence[str] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    own: str = ""

    def split_files(self) -> Iterable[str]:
        """Return all possible values of `Block.file`, to check `--split file:…` early."""
        return (file.path for piece in self.pieces for file in piece.files)

    @abstractmethod
    def read(self, what: Any, reading: BadRecords) -> Iterator[Block]:
        """Yield the samples of one piece; the same samples each time.

        Args:
            what: The piece's `what`.
            reading: Is told about records that cannot be used.

        Raises:
            DataError: A file cannot be read at all.
        """
