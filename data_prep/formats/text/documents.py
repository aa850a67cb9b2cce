"""Documents from text files (whole or by line), JSON Lines and Parquet; gzip and Zstandard too.

One document at a time is in memory. It has at most MAX_DOCUMENT bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from data_prep.formats.files import FileRange, line_at, lines_of, ranges
from data_prep.formats.opening import GROWTH, kind_of, open_parquet, opened, parquet_rows
from data_prep.formats.samples import Unusable
from data_prep.source import BadRecords, SourceFile
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.terminal.terminal import few

PATTERNS = ("*.txt", "*.txt.gz", "*.txt.zst", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
MAX_DOCUMENT = 2**30
_TOO_LONG = f"a document of more than {MAX_DOCUMENT // 2**30} GiB"
_ROWS = 256  # rows of Parquet that are read at once: values that repeat take less in the file
_BOM = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """A text, and the value of the column that decides its split."""

    text: str
    column: str


_Found = tuple[Callable[[], str], Callable[[], Document]]
"""Returns the name of a record for messages; and its document, or raises `Unusable`."""


@dataclass(frozen=True)
class DocumentReader:
    """Reads documents."""

    lines: bool = False  # whether each line of a text file is a document; otherwise the file is one
    key: str = "text"  # the column with the text, in JSON Lines and Parquet
    column: str = ""  # the column that decides the split, or ""

    def parts(self, file: SourceFile, nbytes: int) -> Iterator[tuple[FileRange, int]]:
        """Cut a file into parts; yield each with the approximate bytes of its text."""
        kind, packing = _kind_of(file.path)
        if self.column and not kind:
            raise DataError(
                f"{file.path} is text without columns; --split or --group goes by {self.column!r}"
            )
        if kind == "parquet":
            with open_parquet(file.path) as table:
                place = self._place(table, file.path)
                for group in range(table.num_row_groups):
                    rows = table.metadata.row_group(group)
                    size = rows.column(place).total_uncompressed_size
                    yield FileRange(file.path, group, group + 1), size
        elif packing:
            yield FileRange(file.path), int(file.size * GROWTH[packing])
        elif self._by_line(kind):
            for start, stop in ranges(file.size, nbytes):
                yield FileRange(file.path, start, stop), stop - start
        else:
            yield FileRange(file.path), file.size

    def read(self, part: FileRange, reading: BadRecords) -> Iterator[Document]:
        """Yield the documents of a part in their order, without the empty ones."""
        kind, _ = _kind_of(part.path)
        found = self._lines(part, kind) if self._by_line(kind) else _whole(part)
        for record, decode in self._rows(part) if kind == "parquet" else found:
            try:
                document = decode()
                document.text.encode()
            except Unusable as error:
                reading.bad(part.path, record(), str(error))
            except UnicodeEncodeError as error:
                # JSON can contain halves of characters (surrogates), which no encoding can store.
                half = f"U+{ord(error.object[error.start]):04X}"
                why = f"character {error.start} is {half}, half of a surrogate pair"
                reading.bad(part.path, record(), why)
            else:
                if document.text:
                    yield document
                else:
                    reading.skip("empty")

    def _by_line(self, kind: str) -> bool:
        return kind == "jsonl" or self.lines

    def _lines(self, part: FileRange, kind: str) -> Iterator[_Found]:
        (at, end), number = lines_of(part), 0
        with opened(part) as stream:
            while at < end and (line := stream.readline(MAX_DOCUMENT + 1)):
                start, number = at, number + 1
                at += len(line)

                def record(start: int = start, number: int = number) -> str:
                    return f"line {line_at(part.path, start) if part.start else number}"

                if len(line) > MAX_DOCUMENT:
                    raise DataError(f"{part.path}: {record()} is {_TOO_LONG}")
                if start == 0:
                    line = line.removeprefix(_BOM)
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                if kind != "jsonl":
                    yield record, partial(_document, line)
                elif line.strip():
                    yield record, partial(self._of_json, line)

    def _of_json(self, line: bytes) -> Document:
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise _not_utf8(error) from None
        except RecursionError:
            raise Unusable("no JSON: nested too deep") from None
        except ValueError as error:
            raise Unusable(f"no JSON: {error}") from None
        if not isinstance(row, dict):
            raise Unusable(f"it is no JSON object but {_kind(row)}")
        return self._of_row(row)

    def _of_row(self, row: Mapping[str, Any]) -> Document:
        """Return the document of an object or row."""
        for key in (self.key, *([self.column] if self.column else [])):
            if key not in row:
                has = ", ".join(map(repr, row)) or "nothing"
                raise Unusable(f"it has no {key!r}; it has {has}")
        text, column = row[self.key], row[self.column] if self.column else ""
        if isinstance(text, bytes):  # from Parquet, where bytes need not be text
            text = _decoded(text)
        if not isinstance(text, str):
            raise Unusable(f"{self.key!r} is no text but {_kind(text)}")
        if column is None:
            raise Unusable(f"{self.column!r} is null; --split or --group goes by it")
        if isinstance(column, bytes):
            column = column.decode(errors="backslashreplace")
        return Document(text, str(column))

    def _rows(self, part: FileRange) -> Iterator[_Found]:
        keys = [self.key, *([self.column] if self.column not in ("", self.key) else [])]
        with open_parquet(part.path) as table:
            self._place(table, part.path)
            for batch, number in parquet_rows(table, part, keys, _ROWS):
                columns = [_values(batch.column(key)) for key in keys]
                for values in zip(*columns, strict=True):
                    number += 1
                    row = dict(zip(keys, values, strict=True))
                    yield partial("row {}".format, number), partial(self._of_row, row)

    def _place(self, table: Any, path: str) -> int:
        """Return the number of the text column among the leaf columns of a Parquet file."""
        from pyarrow import types

        schema = table.schema_arrow
        if self.key not in schema.names:
            raise DataError(
                f"{path} has no column {self.key!r}; it has {few(schema.names, 30)}: "
                "--text-column names it"
            )
        kind = schema.field(self.key).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise DataError(f"{path}: the column {self.key!r} is no text but {kind}")
        paths = [table.metadata.schema.column(i).path for i in range(table.metadata.num_columns)]
        return paths.index(self.key)


def _kind_of(path: str) -> tuple[str, str]:
    """Return a file's format ("", which is text, "jsonl", "parquet") and packing."""
    kind, packing = kind_of(path, _SUFFIXES)
    if kind == "parquet" and packing:
        raise ConfigError(f"{path}: Parquet is compressed inside; unpack the file")
    return kind, packing


def _whole(part: FileRange) -> Iterator[_Found]:
    """Yield the whole file as one document."""
    with opened(part) as stream:
        content = stream.read(MAX_DOCUMENT + 1)

    def decode() -> Document:
        if len(content) > MAX_DOCUMENT:
            raise Unusable(f"{_TOO_LONG}; --documents lines takes its lines")
        return _document(content.removeprefix(_BOM))

    yield lambda: "", decode


def _values(array: Any) -> list[Any]:
    """Return the values of a Parquet column; text as bytes."""
    from pyarrow import binary, types

    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    is_text = types.is_string(array.type) or types.is_large_string(array.type)
    found: list[Any] = (array.cast(binary()) if is_text else array).to_pylist()
    return found


def _document(content: bytes) -> Document:
    return Document(_decoded(content), "")


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None


def _not_utf8(error: UnicodeDecodeError) -> Unusable:
    return Unusable(f"no UTF-8: byte {error.start} is {error.object[error.start]:#04x}")


def _kind(value: object) -> str:
    kinds = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text"}
    return kinds.get(type(value).__name__, type(value).__name__)
