"""Export samples to Parquet: SPLIT.parquet has a column for each field.

An array is a fixed_shape_tensor of Arrow, or a fixed-size list if it has one axis. A sequence is a
list, or a string with --text NAME. Values never change: after an export and a new conversion by
`table` the samples are the same.
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.dataset import DataSet, samples_of, sizes
from data_prep.formats.opening import is_utf8
from data_prep.libraries import library
from data_prep.show import console
from data_prep.show.images import is_text
from hpctrain.disk import TEMPORARY, temporary
from hpctrain.errors import ConfigError, DataError
from hpctrain.progress_bar import Progress
from hpctrain.shards.commit import storage_error
from hpctrain.shards.field import Field
from hpctrain.shards.index import Split
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.types import Array

ARGUMENTS = f"""{samples_of("export")}
out=OUT : path
    folder to write; it must be empty or new
--to FORMAT = parquet
    format of the files
--limit N : positive
    export only the first N samples of each split
--text NAME ...
    write this field of UTF-8 bytes as strings
--quiet
    print errors only
"""
# Other formats, and what writes them.
_OTHERS = {
    "npz": "`h5py.File(SHARD)[FIELD][:]` is the array, which numpy.savez writes",
    "images": "Pillow's `Image.fromarray(h5py.File(SHARD)[FIELD][i].transpose(1, 2, 0))` is the "
    "image of sample i",
}


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    data, out = DataSet(args.folder), args.out
    if args.to != "parquet":
        cure = f"; {_OTHERS[args.to]}" if args.to in _OTHERS else ""
        raise ConfigError(f"--to {args.to}: parquet is written{cure}")
    if out.resolve().is_relative_to(data.folder.resolve()):
        raise ConfigError(f"{out} lies in the data set's own folder; give another OUT")
    splits, fields = data.splits(args.split), data.fields(args.field)
    counts = {split.name: min(args.limit or split.count, split.count) for split in splits}
    nbytes = sum(shard.bytes for split in splits for shard in split.shards)
    with _whole(out) as folder:
        export = Parquet(data, fields, args.text)
        with Progress(sum(counts.values()), nbytes, quiet=args.quiet) as progress:
            for split in splits:
                export.write(folder, split, counts[split.name], progress.advance)
    if not args.quiet:
        splits_text = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        left_out = ", ".join(name for name in data.index.fields if name not in fields)
        more = f"; without {left_out}" if left_out else ""
        console.say(f"{out}: {sum(counts.values()):,} samples ({splits_text}) as parquet{more}")


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` at the end, or removed after an error."""
    folder = temporary(out.resolve())
    try:
        if out.exists() and next(out.iterdir(), None) is not None:
            raise DataError(f"{out} is not empty; give an empty or new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = folder.name.rpartition(".")[0]
        for path in folder.parent.iterdir():  # of killed exports to here, by this machine
            found = TEMPORARY.match(path.name)
            same = found is not None and path.name.rpartition(".")[0] == prefix
            if found and same and not Path("/proc", found["pid"]).exists():
                shutil.rmtree(path, ignore_errors=True)
        folder.mkdir()
        yield folder
        os.replace(folder, out.resolve())
    except (NotADirectoryError, FileExistsError):
        raise DataError(f"{out} is a file, or lies in one; OUT is a folder") from None
    except OSError as error:
        raise storage_error(out, error) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Parquet:
    """Writes SPLIT.parquet; fields with UTF-8 bytes in `text` become strings."""

    def __init__(self, data: DataSet, fields: Mapping[str, Field], text: Sequence[str]) -> None:
        known = [name for name, field in fields.items() if is_text(field)]
        for name in text:
            if name not in known:
                there = ", ".join(known) or "none"
                raise ConfigError(f"--text {name!r}: it is a field uint8[*]; there are {there}")
        self._pa, self._pq = (
            library(name, "--to parquet", error=ConfigError)
            for name in ("pyarrow", "pyarrow.parquet")
        )
        self.data, self.fields, self._text = data, fields, text

    def write(
        self, folder: Path, split: Split, count: int, advance: Callable[[int, int], None]
    ) -> None:
        """Write the first `count` samples of a split."""
        columns = [self._column(name, field) for name, field in self.fields.items()]
        schema = self._pa.schema(columns, metadata={"hpctrain": self.data.index.digest})
        with self._pq.ParquetWriter(folder / f"{split.name}.parquet", schema) as writer:
            first = 0
            for rows in self.data.blocks(split, self.fields, count):
                arrays = [self._array(name, value, first) for name, value in rows.items()]
                writer.write_table(self._pa.table(arrays, schema=schema))
                samples = len(next(iter(rows.values())))
                first += samples
                advance(samples, sizes(rows, self.fields))

    def _column(self, name: str, field: Field) -> Any:
        metadata = {"shape": json.dumps(list(field.shape))}
        if names := list(self.data.categories(name)):
            metadata["categories"] = json.dumps(names)
        kind = self._element(field)
        if field.variable:
            kind = self._pa.large_list(kind)
        if name in self._text:
            kind = self._pa.large_string()
        return self._pa.field(name, kind, nullable=False, metadata=metadata)

    def _element(self, field: Field) -> Any:
        """Return the Arrow type of an array: a list, or a tensor if it has several axes."""
        kind = self._pa.from_numpy_dtype(np.dtype(field.dtype))
        if len(field.shape) > 1:
            return self._pa.fixed_shape_tensor(kind, field.shape)
        return self._pa.list_(kind, field.shape[0]) if field.shape else kind

    def _array(self, name: str, value: Array | Ragged, first: int) -> Any:
        field, pa = self.fields[name], self._pa
        if name in self._text:
            return self._strings(name, value, first)
        array = pa.array((value.values if isinstance(value, Ragged) else value).reshape(-1))
        if field.shape:
            array = pa.FixedSizeListArray.from_arrays(array, int(np.prod(field.shape)))
            if len(field.shape) > 1:
                array = pa.ExtensionArray.from_storage(self._element(field), array)
        if isinstance(value, Ragged):
            array = pa.LargeListArray.from_arrays(pa.array(value.offsets), array)
        return array

    def _strings(self, name: str, value: Any, first: int) -> Any:
        buffers = [None, self._pa.py_buffer(value.offsets), self._pa.py_buffer(value.values)]
        array = self._pa.Array.from_buffers(self._pa.large_string(), len(value), buffers)
        try:
            array.validate(full=True)
        except self._pa.ArrowInvalid:
            bad = next(i for i, sample in enumerate(value) if not is_utf8(sample.tobytes()))
            raise DataError(
                f"--text {name!r}: sample {first + bad} is not UTF-8; leave --text out, and it "
                "becomes a list of bytes"
            ) from None
        return array
