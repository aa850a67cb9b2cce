"""Export to Parquet by pyarrow: a column for each field, row groups of a few MB."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.dataset import DataSet, sizes
from data_prep.libraries import library
from data_prep.show.images import is_text
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.field import Field
from hpctrain.shards.index import Split
from hpctrain.shards.ragged import Ragged
from hpctrain.shards.types import Array


class Parquet:
    """Writes SPLIT.parquet.

    Args:
        data: The data set.
        fields: The fields to write.
        text: Names of fields with UTF-8 bytes that become strings.
    """

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
        kind = self._pa.from_numpy_dtype(np.dtype(field.dtype))
        if field.shape:
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
        return self._pa.list_(kind, field.shape[0])

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
            bad = next(i for i, sample in enumerate(value) if not _is_utf8(sample))
            raise DataError(
                f"--text {name!r}: sample {first + bad} is not UTF-8; leave --text out, and it "
                "becomes a list of bytes"
            ) from None
        return array


def _is_utf8(sample: Array) -> bool:
    try:
        sample.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return True
