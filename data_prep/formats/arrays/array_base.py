"""An array in a file that is read by ranges of rows.

A format says its arrays' names, and of one array the dtype, the shape, the chunks and how rows
along an axis are read. The rest is done here once: which axis counts the samples, arrays that are
one sample, chunks that are read once, errors, and closing. `array_numpy` reads .npy and .npz,
`array_hdf5` HDF5; `array_files` has them in a table.
Memory is needed for the requested rows only, whatever the size of the file.
"""

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from hpctrain.base.errors import ConfigError, DataError, HpctrainError
from hpctrain.base.terminal.terminal import few
from hpctrain.data.shards.field import MAX_AXES
from hpctrain.data.shards.types import Array

HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".h5ad")
FORMS = "FILE.npy, FILE.npz:KEY, FILE.h5:/PATH (or a pattern, /*/PATH)"
TEXT = "SUT"  # the kinds of dtypes that are text, of a fixed or any length
SLAB_BYTES = 128 * 2**20  # rows that are stored together are read together, up to this size


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


class ArrayFile(ABC):
    """An open array. It is a context manager that closes the file.

    `axis` counts the samples, and `shape` becomes (samples, *sample); without an axis the whole
    array is one sample, (1, *shape). A chunk is stored together: reading one of its rows costs as
    much as reading all. A file that is `single` holds one value without axes, which has to be taken
    whole; with `text` the values are text. `hint`
    ends the message about values that cannot be read. `filled` says whether a fill value stands for
    values that were never written.
    """

    hint, filled = "", True

    def __init__(
        self,
        where: Where,
        dtype: Any,
        shape: Sequence[int],
        axis: int | None,
        *,
        chunks: Sequence[int] | None = None,
    ) -> None:
        check_dtype(where, dtype)
        self.where, self.dtype = where, np.dtype(dtype)
        self.single, self.text = not shape, dtype.kind in TEXT
        self._whole, axis, shape = axis is None, axis or 0, tuple(shape) or (1,)
        if not -len(shape) <= axis < len(shape):
            raise ConfigError(f"--axis {axis}: {where} has {len(shape)} axes, {tuple(shape)}")
        if len(shape) > MAX_AXES:
            raise DataError(f"{where} has {len(shape)} axes; HDF5 allows {MAX_AXES}")
        self.axis = axis % len(shape)
        self._rows_shape = (shape[self.axis], *shape[: self.axis], *shape[self.axis + 1 :])
        self.shape = self._rows_shape
        if self._whole:
            self.shape = (1,) if self.single else (1, *self._rows_shape)
        chunk = chunks[self.axis] if chunks and len(chunks) == len(shape) else 1
        self._row_bytes = max(1, self.dtype.itemsize * math.prod(self._rows_shape[1:]))
        self._chunk = chunk if chunk * self._row_bytes <= SLAB_BYTES else 1
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
        with reading(self.where, self.hint):
            return self._rows(start, stop)

    @abstractmethod
    def _rows(self, start: int, stop: int) -> Array:
        """Return rows along the axis. What a library raises for damage may pass."""

    def unwritten(self) -> str:
        """Return how many of the rows have values that were never written, or ""."""
        with reading(self.where):
            return self._unwritten()

    def _unwritten(self) -> str:
        return ""

    def _cut(self, stored: Any, start: int, stop: int) -> Array:
        """Return rows of what a library has opened."""
        if self.single:
            return np.asarray(stored[()]).reshape(1)
        cut = stored[(slice(None),) * self.axis + (slice(start, stop),)]
        return np.moveaxis(np.asarray(cut), self.axis, 0)

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


def never_written(count: int, of: int) -> str:
    """Say that so many of the rows have values that were never written; "" for none."""
    return f"has {count:,} of {of:,} rows with values that were never written" if count else ""


def check_written(lacks: str, name: str, *, filled: bool, accepted: bool) -> None:
    """Refuse a field with values that were never written, unless the fill value is to be taken."""
    if not filled:
        raise DataError(f"{lacks}, and no fill value stands for them")
    if not accepted:
        raise DataError(
            f"{lacks}; --unwritten {name} takes the fill value for them, which is right if the "
            "writer leaves out what holds nothing else"
        )


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
