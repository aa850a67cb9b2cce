"""Sparse matrices in HDF5, of AnnData (.h5ad), 10x Genomics and MATLAB, as dense rows.

A matrix in rows (CSR) has the values `data` of all rows one after the other, the column of each in
`indices`, and the place where each row begins in `indptr`. In columns (CSC) the same is said of the
transposed matrix, so that its columns can be samples, and its rows cannot.
"""

from typing import Any, NamedTuple

import h5py
import numpy as np

from data_prep.formats.arrays.array_base import ArrayFile, Where, never_written
from data_prep.formats.hdf5 import matlab
from data_prep.formats.hdf5.hdf5_storage import Written
from data_prep.formats.hdf5.matlab import SPARSE, text_of
from hpctrain.errors import DataError
from hpctrain.shards.types import Array

_PARTS = ("data", "indices", "indptr")


class Form(NamedTuple):
    """How a group holds a sparse matrix."""

    axis: int  # the axis whose rows can be read
    shape: tuple[int, int]  # the shape of the matrix
    # The names of the values, of their columns, and of the beginnings of the rows.
    parts: tuple[str, str, str]


def form_of(group: Any) -> Form | None:
    """Return the form of the sparse matrix in a group; None if it holds none."""
    if not isinstance(group, h5py.Group):
        return None
    own = [part for part in (*_PARTS, "shape") if _own(group, part) is not None]
    kind = text_of(group, "encoding-type") or text_of(group, "h5sparse_format")
    if kind.removesuffix("_matrix") in ("csr", "csc"):
        shape = group.attrs.get("shape", group.attrs.get("h5sparse_shape", (0, 0)))
        return Form(int(kind.startswith("csc")), (int(shape[0]), int(shape[1])), _PARTS)
    if not kind and len(own) == 4:  # 10x Genomics: (genes, cells)
        shape, count = np.ravel(group["shape"][()]).tolist(), len(group["indptr"]) - 1
        if len(shape) == 2 and shape.count(count) == 1:
            return Form(shape.index(count), (int(shape[0]), int(shape[1])), _PARTS)
    if SPARSE in group.attrs and _own(group, "jc") is not None:
        # MATLAB stores columns, and its axes are reversed in HDF5.
        return Form(0, (len(group["jc"]) - 1, int(group.attrs[SPARSE])), ("data", "ir", "jc"))
    return None


def _own(group: h5py.Group, name: str) -> h5py.Dataset | None:
    """Return a dataset with an axis in a group, unless a link or the dataset leads elsewhere."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        return None
    found = group[name]
    here = isinstance(found, h5py.Dataset) and not (found.is_virtual or found.external)
    return found if here and found.ndim == 1 else None


def part_of(found: Any) -> str:
    """Return what is wrong with a dataset that is only a part of a sparse matrix; otherwise ""."""
    form = form_of(found.parent) if isinstance(found, h5py.Dataset) else None
    if form is None or found.name.rpartition("/")[2] not in form.parts:
        return ""
    return f"is a part of the sparse matrix {found.parent.name}; name the matrix"


class SparseArray(ArrayFile):
    """A sparse matrix, whose rows along an axis are read as dense ones; see `form_of`."""

    def __init__(self, where: Where, group: h5py.Group, form: Form, axis: int | None) -> None:
        if (axis or 0) % 2 != form.axis:
            mine, other = ("columns", "rows") if form.axis else ("rows", "columns")
            to = "tocsr" if form.axis else "tocsc"
            raise DataError(
                f"{where} is a sparse matrix stored by {mine}, so that its {other} cannot be read "
                f"one by one. `data.X = data.X.{to}(); data.write_h5ad(FILE)` in Python stores "
                f"them; --axis NAME={form.axis} takes the {mine} as samples"
            )
        parts = []
        for of in form.parts:
            if (part := _own(group, of)) is None:
                raise DataError(f"{where} is a sparse matrix without {of} in this file")
            if problem := Written(part).problem():
                raise DataError(f"{where}/{of} {problem}")
            parts.append(part)
        self._written = {
            name: (part, Written(part)) for name, part in zip(form.parts, parts, strict=True)
        }
        self.filled = all(written.filled for _, written in self._written.values())
        self._data, self._columns, starts = parts
        self._starts = starts[()].astype(np.int64)
        shape = form.shape[::-1] if form.axis else form.shape
        super().__init__(where, self._data.dtype, shape, None if axis is None else 0)
        self.note = matlab.axes(group, form.shape, axis or 0)
        counts = np.diff(self._starts, prepend=0)
        sizes = len(self._starts) - 1, int(counts.sum()), len(self._columns)
        fit = sizes == (shape[0], len(self._data), len(self._data))
        if not fit or (counts < 0).any() or self._starts[:1].any():
            raise DataError(f"{where} is damaged: {form.parts[2]} does not fit the values")

    def _unwritten(self) -> str:
        for name, (part, written) in self._written.items():
            if text := never_written(written.unwritten(), len(part)):
                return f"is sparse, and its {name} {text}"
        return ""

    def _rows(self, start: int, stop: int) -> Array:
        first, last = int(self._starts[start]), int(self._starts[stop])
        dense = np.zeros((stop - start, self._rows_shape[1]), self.dtype)
        columns = self._columns[first:last].astype(np.int64)
        if len(columns) and not (columns.min() >= 0 and columns.max() < dense.shape[1]):
            raise DataError(f"{self.where} is damaged: a value lies outside of the matrix")
        rows = np.repeat(np.arange(stop - start), np.diff(self._starts[start : stop + 1]))
        np.add.at(dense, (rows, columns), self._data[first:last])  # equal places are added up
        return dense
