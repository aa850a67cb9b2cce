"""Export to NumPy's .npz, block by block, so that no field has to fit into memory."""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_prep.datasets.dataset import DataSet
from hpctrain.shards.field import Field
from hpctrain.shards.index import Split
from hpctrain.shards.ragged import Ragged, offsets_of
from hpctrain.shards.types import Array


class Npz:
    """Writes SPLIT.npz."""

    def __init__(self, data: DataSet, fields: Mapping[str, Field]) -> None:
        self.data, self.fields = data, fields

    def write(
        self, folder: Path, split: Split, count: int, advance: Callable[[int, int], None]
    ) -> None:
        """Write the first `count` samples of a split."""
        with zipfile.ZipFile(folder / f"{split.name}.npz", "w", allowZip64=True) as file:
            for name, field in self.fields.items():
                blocks = self.data.blocks(split, {name: field}, count)
                arrays = (_values(rows[name], advance) for rows in blocks)
                if not field.variable:
                    _member(file, name, field.dtype, (count, *field.shape), arrays)
                    continue
                offsets = offsets_of(self.data.lengths(split, name)[:count])
                shape = (int(offsets[-1]), *field.shape)
                _member(file, f"{name}.values", field.dtype, shape, arrays)
                _member(file, f"{name}.offsets", "int64", offsets.shape, [offsets])
        advance(count, 0)


def _values(value: Array | Ragged, advance: Callable[[int, int], None]) -> Array:
    array = value.values if isinstance(value, Ragged) else value
    advance(0, array.nbytes)
    return array


def _member(
    file: zipfile.ZipFile, name: str, dtype: str, shape: Sequence[int], arrays: Iterable[Array]
) -> None:
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    member = zipfile.ZipInfo(f"{name}.npy")  # dated 1980, so the file's bytes are always the same
    with file.open(member, "w", force_zip64=True) as target:
        np.lib.format.write_array_header_1_0(target, header)
        for array in arrays:
            target.write(np.ascontiguousarray(array).data)
