"""What a converter is: data with a schema, cut into pieces that can be read one by one.

A piece becomes shards of its own, whoever reads it and whenever: that is what makes a conversion
parallel, resumable, and the same for every number of workers. So `read` must be a function of
the piece alone. About as much data as a shard holds makes a good piece.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpctrain.data.field import Field
from hpctrain.data.sample_schema import ArrayBatch
from hpctrain.errors import DataError

BLOCK_BYTES = 8 * 2**20  # that are read, checked and passed on at once, about


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read, as it was when the work was planned."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path | str) -> "SourceFile":
        """Look at a file.

        Raises:
            DataError: It is not there, or cannot be looked at.
        """
        try:
            found = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        return cls(str(path), found.st_size, found.st_mtime_ns)

    def check(self) -> None:
        """See that it is still the same.

        Raises:
            DataError: It is not.
        """
        if SourceFile.of(self.path) != self:
            raise DataError(f"{self.path} was changed while it was being read; run this again")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source.

    Attributes:
        what: For the source's `read`; small, as it goes to another process.
        files: That it is read from.
        samples: How many, where that is known beforehand; for the progress.
        bytes: Of the data that it becomes, about; for the progress and the room on the disk.
    """

    what: Any
    files: Sequence[SourceFile] = ()
    samples: int | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive samples of a piece: a few MB, at least one.

    Attributes:
        values: Each field's: (n, *shape), or for a variable-length one a `Ragged` or n arrays.
            They may be kept: the source does not write into them again.
        keys: What decides each sample's split; None: the content of all fields.
        column: The values of the column that `--split column:NAME` asks for.
        file: That the samples are from, for `--split file:…`.
        records: What each is called in a message, such as "line 17"; None: its number.
    """

    values: ArrayBatch
    keys: Sequence[bytes] | None = None
    column: Sequence[str] | None = None
    file: str = ""
    records: Sequence[str] | None = None


@runtime_checkable
class Reading(Protocol):
    """Whom a source tells what it cannot use."""

    def bad(self, file: str, record: str, reason: str) -> None:
        """A record that cannot be used: as `--on-error` says, raises, or leaves it out.

        Raises:
            DataError: With all three, when one such record is to be the end.
        """

    def skip(self, reason: str) -> None:
        """A record that holds nothing, such as an empty document: left out and counted."""


@dataclass(frozen=True)
class Source:
    """Base of the converters' sources; they are sent to other processes, so they pickle.

    Attributes:
        name: The command's.
        fields: The schema.
        pieces: In the order of the samples.
        identity: What the result depends on besides the files, the schema and the common
            options; JSON.
        about: For the provenance; JSON.
        categories: The names of the values 0, 1, … of a field.
        columns: That a split can go by.
        folders: That were searched for files: OUT may not be inside of them.
        beside: Text files by their names, which stand beside the shards: what a reader of the
            data needs too, such as a tokenizer.
    """

    name: str
    fields: Mapping[str, Field]
    pieces: Sequence[Piece]
    identity: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    columns: Sequence[str] = ()
    folders: Sequence[str] = ()
    beside: Mapping[str, str] = field(default_factory=dict)

    def split_files(self) -> Iterable[str]:
        """All that `Block.file` may be, to see early whether `--split file:…` knows them."""
        return (file.path for piece in self.pieces for file in piece.files)

    def read(self, what: Any, reading: Reading) -> Iterator[Block]:
        """Yield the samples of the piece whose `what` this is; the same ones each time.

        Raises:
            DataError: A file cannot be read at all.
        """
        raise NotImplementedError


def in_groups(files: Iterable[SourceFile], nbytes: int) -> Iterator[list[SourceFile]]:
    """Yield runs of files of about so many bytes, at least one in each."""
    group: list[SourceFile] = []
    size = 0
    for file in files:
        if group and size + file.size > nbytes:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group
