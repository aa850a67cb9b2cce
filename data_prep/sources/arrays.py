"""Arrays as fields: NumPy and HDF5 files. The first axis counts the samples.

    arrays x.npy y.npy more.npz OUT              fields x, y, and the keys of more.npz
    arrays OUT --field image=FILE.h5:/x/data     an array in HDF5
    arrays OUT --field u=run1.npy --field u=run2.npy    joined along the sample axis
               --field u='run*.h5:u'             joined in natural order: run2 before run10
    arrays OUT --field u=FILE.npy --axis u=2 --cast u=float32
    arrays OUT --field eeg='FILE.h5:/rec_*/eeg'         a group per sample: each match is a sample,
               --field label='FILE.h5:/rec_*@label'     in natural order; PATH@NAME is an attribute
    arrays OUT --field u='run*.npy' --axis u=none       each whole array is a sample

A FILE.h5 without a path must hold one array; otherwise the error lists its arrays.
--split file:… uses the files of the first field. --split column:NAME takes the names of the splits
from a field of text or whole numbers.

Patterns of several fields must match the same groups. If whole arrays differ in the size of one
axis, the field has a variable length, and this axis becomes the first one. --axis joins the matches
of a pattern along an axis instead. Arrays of MATLAB, sparse
matrices, and numbers that are packed or may mean that a value is missing (the attributes of NetCDF,
such as scale_factor and _FillValue) are refused: their libraries read them.

Values do not change, with these exceptions:

- bool is stored as uint8, text as variable-length uint8 (UTF-8), and
  other byte orders as little-endian.
- --cast converts the dtype. A sample with a value that does not fit, or with a fraction that would
  be cut off, cannot be used.

Values that were never written are refused: chunks that a file does not have. --unwritten
NAME takes the fill value for them, if there is one. So is content that
does not have the checksum of its .npz. External links and virtual datasets of HDF5 are refused.

Files may be larger than memory: about 8 MB of each field are in memory at a time, or up to 128 MB
if the array is compressed or transposed. Arrays of an .npz are read whole.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.arrays.array_base import Where
from data_prep.formats.arrays.array_columns import ArrayColumn, ArrayPart, OpenColumn, open_parts
from data_prep.formats.arrays.array_files import addresses
from data_prep.formats.files import ranges
from data_prep.formats.samples import is_name
from data_prep.options import Options, pairs, writing
from data_prep.source import BLOCK_BYTES, BadRecords, InputSource, Piece, SampleBlock, SourceFile
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.field import DTYPES
from hpctrain.data.shards.types import Array

ARGUMENTS = f"""
files=FILE* : path
    .npy or .npz
--field NAME=FILE[:KEY] ...
    an array as the field NAME; the arrays of a repeated NAME are joined
--axis NAME=K ...
    the axis that counts the samples, from 0; -1: the last; none: each array is a sample
--cast NAME=DTYPE ...
    store the field in another dtype; values that change cannot be used
--unwritten NAME ...
    take the fill value for values that were never written
{writing()}
"""


@dataclass(frozen=True)
class _Arrays(InputSource):
    data: tuple[ArrayColumn, ...] = ()
    step: int = 1

    def split_files(self) -> Iterator[str]:
        """Return the files of the first field."""
        return (part.where.path for part in self.data[0].parts)

    def read(self, what: tuple[int, int], reading: BadRecords) -> Iterator[SampleBlock]:
        """See `InputSource`."""
        with ExitStack() as stack:
            columns = [OpenColumn(column) for column in self.data]
            for column in columns:
                stack.callback(column.close)
            # Each block is from one file of the first field, for `--split file:…`.
            end = start = what[0]
            by_file = groupby(self.data[0].spans(*what), lambda span: span[0].where.path)
            for _, spans in by_file:
                part, *_ = first = next(spans)
                end += sum(stop - begin for _, begin, stop in (first, *spans))
                while start < end:
                    stop = min(start + self.step, end)
                    yield from self._block(columns, part, start, stop, reading)
                    start = stop

    def _block(
        self, columns: list[OpenColumn], part: ArrayPart, start: int, stop: int, reading: BadRecords
    ) -> Iterator[SampleBlock]:
        good = np.ones(stop - start, bool)
        values: dict[str, Array | list[Array]] = {}
        for column in columns:
            values[column.column.name], problems = column.rows(start, stop)
            for row, why in sorted(problems.items()):
                if good[row]:
                    good[row] = False
                    of, number = column.column.place(start + row)
                    why = f"field {column.column.name!r}: {why}"
                    reading.bad(str(of.where), f"row {number}", why)
        kept = np.flatnonzero(good)
        if len(kept) < len(good):
            values = {
                name: [found[row] for row in kept] if isinstance(found, list) else found[kept]
                for name, found in values.items()
            }
        if len(kept):
            yield SampleBlock(
                values,
                file=part.where.path,
                records=lambda sample: self._name(start + int(kept[sample])),
            )

    def _name(self, row: int) -> str:
        part, number = self.data[0].place(row)
        return part.where.key if self.data[0].axis is None else f"row {number}"


def source(args: argparse.Namespace, options: Options) -> InputSource:
    """Return the arrays that the command line names, with the same number of samples."""
    wheres, notes = addresses(args.files, args.field)
    axis_of = _by_field("--axis", args.axis, wheres, "K")
    cast_of = _by_field("--cast", args.cast, wheres, "DTYPE")
    filled = _by_field("--unwritten", [f"{name}=yes" for name in args.unwritten], wheres, "yes")
    columns, fields = [], {}
    for name, parts in wheres.items():
        given = axis_of.get(name, "none" if parts[0].matched else "")
        how = _axis(given or "0"), _dtype(cast_of.get(name, ""))
        column, fields[name] = open_parts(name, parts, *how, unwritten=name in filled)
        columns.append(column)
        notes.append(column.note)
    if not options.quiet:
        for note in filter(None, notes):
            print(f"note: {note}", file=sys.stderr)
    total = _count(columns)
    row_bytes = max(1, sum(column.nbytes for column in columns) // total)
    paths = dict.fromkeys(part.where.path for column in columns for part in column.parts)
    known = {path: SourceFile.of(path) for path in paths}
    return _Arrays(
        name="arrays",
        fields=fields,
        pieces=[
            Piece((start, stop), _files(columns, start, stop, known), (stop - start) * row_bytes)
            for start, stop in ranges(total, max(1, options.shard_bytes // row_bytes))
        ],
        identity={
            c.name: {
                "parts": [[p.where.key, p.rows, p.dtype] for p in c.parts],
                "axis": c.axis,
                "cast": c.cast,
            }
            for c in columns
        },
        about={"fields": {column.name: _about(column) for column in columns}},
        columns=[name for name, field in fields.items() if is_name(field)],
        data=tuple(columns),
        step=max(1, BLOCK_BYTES // row_bytes),
    )


def _by_field(
    option: str, texts: Sequence[str], fields: Mapping[str, Any], what: str
) -> dict[str, str]:
    values = pairs(option, texts, f"NAME={what}")
    for name in values:
        if name not in fields:
            raise ConfigError(
                f"{option}: there is no field {name!r}; there are {', '.join(fields)}"
            )
    return values


def _axis(text: str) -> int | None:
    if text == "none":
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise ConfigError(f"--axis: {text!r} is not the number of an axis, from 0, or -1 or none")
    return int(text)


def _dtype(text: str) -> str:
    if text and text not in DTYPES:
        raise ConfigError(f"--cast: {text!r} is not one of {', '.join(DTYPES)}")
    return text


def _count(columns: Sequence[ArrayColumn]) -> int:
    """Return the number of samples, after checking that it is the same in all fields."""
    first, *others = (
        (column.ends[-1], few((part.where for part in column.parts), 1)) for column in columns
    )
    for count, named in others:
        if count != first[0]:
            raise DataError(
                f"{first[1]} has {first[0]} samples, {named} has {count}; --axis NAME=K says which "
                "axis is the sample"
            )
    return first[0]


def _about(column: ArrayColumn) -> dict[str, Any]:
    """Return the origin of a field and how its numbers were converted, as JSON."""
    first, last = (
        str(Where(str(Path(part.where.path).absolute()), part.where.key))
        for part in (column.parts[0], column.parts[-1])
    )
    count = len(column.parts)
    about: dict[str, Any] = {"from": first if count == 1 else f"{first} … {last} ({count} arrays)"}
    about |= {"axis": column.axis} if column.axis else {}
    return about | ({"cast": column.cast} if column.cast else {})


def _files(
    columns: Sequence[ArrayColumn], start: int, stop: int, known: Mapping[str, SourceFile]
) -> list[SourceFile]:
    """Return the files that a piece is read from."""
    spans = (part for column in columns for part, *_ in column.spans(start, stop))
    return [known[path] for path in dict.fromkeys(part.where.path for part in spans)]
