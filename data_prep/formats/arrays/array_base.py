"""An array in a file that is read by ranges of rows.

A format says its arrays' names, and of one array what `OpenedArray` has. The rest is done here
once: which axis counts the samples, arrays that are one sample, chunks that are read once, errors,
and closing. `array_numpy` reads .npy and .npz, `array_hdf5` HDF5; `array_files` has them in a
table. Memory is needed for the requested rows only, whatever the size of the file.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from data_prep.formats.hdf5.hdf5_storage import Written
from hpctrain.base.errors import ConfigError, DataError, HpctrainError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.field import MAX_AXES
from hpctrain.data.shards.types import Array

HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad")
FORMS = "FILE.npy, FILE.npz:KEY, FILE.h5:/PATH (or a pattern, /*/PATH)"
TEXT = "SUT"  # the kinds of dtypes that are text, of a fixed or any length
_SLAB_BYTES = 128 * 2**20  # rows that are stored together are read together, up to this size


@dataclass(frozen=True, slots=True)
class Where:
    """The address of an array: a file, and the array in it."""

    path: str
    key: str = ""  # the text after the colon: the array's name in the file
    # Names the sample if the key comes from a pattern; see `groups.Match`.
    matched: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.path}:{self.key}" if self.key else self.path

    @property
    def kind(self) -> str:
        """The format by the file's ending: npy, npz, hdf5; "" for others."""
        name = self.path.rstrip("/").lower()
        if name.endswith(HDF5):
            return "hdf5"
        return name[-3:] if name.endswith((".npy", ".npz")) else ""


@dataclass(frozen=True)
class OpenedArray:
    """An array as the library of a format has opened it."""

    dtype: Any
    shape: Sequence[int]
    array: Callable[[], Any]  # returns what rows are cut from
    # Returns why rows along an axis are damaged, or "".
    problem: Callable[[int, int, int], str] = lambda *_: ""
    chunks: Sequence[int] | None = None  # what is stored together is read together
    mixed: bool = False  # rows lie among each other, as in Fortran's order
    written: Written | None = None  # which values of an HDF5 dataset were written
    hint: str = ""  # ends the message about values that cannot be read


class ArrayFile:
    """An open array. It is a context manager that closes the file.

    `axis` counts the samples, and `shape` becomes (samples, *sample); without an axis the whole
    array is one sample, (1, *shape). A chunk is stored together: reading one of its rows costs as
    much as reading all. A file that is `single` holds one value without axes, which has to be taken
    whole; with `text` the values are text.
    """

    def __init__(self, where: Where, stored: OpenedArray, axis: int | None) -> None:
        check_dtype(where, stored.dtype)
        self.where, self.stored, self.dtype = where, stored, np.dtype(stored.dtype)
        self.single, self.text = not stored.shape, stored.dtype.kind in TEXT
        self._whole, axis, shape = axis is None, axis or 0, tuple(stored.shape) or (1,)
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(f"--axis {axis}: {where} has {len(shape)} axes, {tuple(shape)}")
        if len(shape) > MAX_AXES:
            raise DataError(f"{where} has {len(shape)} axes; HDF5 allows {MAX_AXES}")
        self.axis = axis % len(shape)
        self._rows_shape = (shape[self.axis], *shape[: self.axis], *shape[self.axis + 1 :])
        self.shape = self._rows_shape
        if self._whole:
            self.shape = (1,) if self.single else (1, *self._rows_shape)
        row_bytes = max(1, self.dtype.itemsize * math.prod(self._rows_shape[1:]))
        chunk = stored.chunks[self.axis] if stored.chunks else 1
        self._chunk = chunk if chunk * row_bytes <= _SLAB_BYTES else 1
        if not stored.chunks and (self.axis or stored.mixed):
            # Rows lie among each other: take as many at once as memory allows.
            self._chunk = max(1, _SLAB_BYTES // 4 // row_bytes)
        self._slab: tuple[int, Array] | None = None
        self._opened = ExitStack()

    def rows(self, start: int, stop: int) -> Array:
        """Return these rows as (stop - start, *sample). The caller must not change them."""
        if self._whole:
            return self._read(0, self._rows_shape[0]).reshape(self.shape)
        if self._chunk == 1:
            return self._read(start, stop)
        if self._slab is not None:
            first, slab = self._slab
            if first <= start and stop <= first + len(slab):
                return slab[start - first : stop - first]
        first = start - start % self._chunk
        slab = self._read(first, min(self.shape[0], -(-stop // self._chunk) * self._chunk))
        self._slab = first, slab
        return slab[start - first : stop - first]

    def _read(self, start: int, stop: int) -> Array:
        with reading(self.where, self.stored.hint):
            # Before reading: afterwards, HDF5 finds each chunk in its cache.
            if problem := self.stored.problem(start, stop, self.axis):
                raise DataError(f"{self.where} {problem}")
            array = self.stored.array()
            if self.single:
                return np.asarray(array[()]).reshape(1)
            cut = array[(slice(None),) * self.axis + (slice(start, stop),)]
            # Of what is mapped take a copy: while it is read, errors are caught.
            cut = np.array(cut) if isinstance(cut, np.memmap) else np.asarray(cut)
            return np.moveaxis(cut, self.axis, 0)

    def opened_by(self, opened: ExitStack) -> Self:
        """Return this array, which now closes what `opened` has."""
        self._opened = opened.pop_all()
        return self

    def close(self) -> None:
        """Close the file if it is open."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def reading(where: Where, hint: str = "") -> Iterator[None]:
    """Turn what libraries raise for damaged files, which may be anything, into a DataError."""
    try:
        yield
    except (HpctrainError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror and error.errno:
            # The libraries put the path into strerror.
            raise DataError(f"{where.path} cannot be read: {os.strerror(error.errno)}") from None
        text = " ".join(str(error).split()) or type(error).__name__
        what = "HDF5" if where.kind == "hdf5" else "NumPy"
        raise DataError(f"{where} is not readable as {what}: {text}{hint}") from None


def choose(where: Where, names: Mapping[str, str]) -> str:
    """Return the name of the array in a file. Without a key the file must have only one."""
    if where.key in names:
        return where.key
    if not names:
        raise DataError(f"{where.path} holds no arrays")
    if not where.key and len(names) == 1:
        return next(iter(names))
    shown = [f"{name} {what}".rstrip() for name, what in names.items()]
    problem = f"has no array {where.key!r}" if where.key else "holds several arrays"
    name = next(iter(names))
    of = re.sub(r"[^A-Za-z0-9_.-]", "_", name.rpartition("/")[2]) or "x"
    group = "" if where.kind == "npz" else "; a pattern, /*/x, takes one of each group as a sample"
    raise ConfigError(
        f"{where.path} {problem}; there are: {few(shown, 20, '; ')}. For example: "
        f"--field {of}={where.path}:{name}{group}"
    )


def check_dtype(where: Where, dtype: Any) -> None:
    """Refuse a dtype that is not real numbers."""
    kind = dtype.kind if isinstance(dtype, np.dtype) else "V"
    if kind in "biuf" + TEXT:
        return
    raise DataError(
        f"{where} is of dtype {dtype}: save arrays of numbers (dates as int64, the real and the "
        "imaginary part of complex numbers, or each name of a record, as fields of their own)"
    )
