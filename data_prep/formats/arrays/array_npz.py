"""Arrays in .npz files; see `array_base`."""

import atexit
import math
import os
import struct
import zipfile
from contextlib import ExitStack
from functools import cached_property, lru_cache

import numpy as np

from data_prep.formats.arrays.array_base import ArrayFile, Where, check_dtype, choose, reading
from data_prep.formats.arrays.array_numpy import check_size, header
from data_prep.source import SourceFile
from hpctrain.errors import DataError
from hpctrain.shards.types import Array

_READ_BYTES = 2**20  # bytes that are read at once
_END_BYTES = 22 + 2**16  # size of the end of a zip file at most: its record and a comment
_MANY = 2**16 - 1  # what a zip file says if it has this number of members or more


def open_npz(where: Where, axis: int | None, external: bool, opened: ExitStack) -> ArrayFile:
    """Open a member of a .npz file."""
    name = choose(where, dict.fromkeys(npz_names(where.path), "")) + ".npy"
    found = os.stat(where.path)
    stream = _stream(where.path, name, found.st_size, found.st_mtime_ns)
    check_dtype(where, stream.dtype)
    needed = stream.dtype.itemsize * math.prod(stream.shape)
    check_size(where, needed, stream.size - stream.begin)
    return _Member(where, axis, stream)


def npz_names(path: str) -> list[str]:
    """Return the keys of an .npz."""
    SourceFile.of(path)
    with reading(Where(path)):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        listed = _listed_members(path)
    if listed not in (_MANY, len(names)):  # a damaged length can hide members
        raise DataError(f"{path} is damaged: it says {listed} arrays, and lists {len(names)}")
    keys = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
    if {"data", "shape", "format"} <= set(keys):
        raise DataError(
            f"{path} is a sparse matrix of SciPy: `numpy.save('x.npy', scipy.sparse.load_npz(FILE)"
            ".toarray())` in Python stores it as an array"
        )
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise DataError(f"{path} holds {min(twice)!r} twice")
    if other := [name for name in names if not name.endswith(".npy")]:
        raise DataError(f"{path} holds {other[0]!r}, which is not an array")
    return keys


def _listed_members(path: str) -> int:
    """Return the number of members that the end of a zip file says."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        end = file.read()
    (count,) = struct.unpack_from("<H", end, end.rindex(b"PK\5\6") + 10)
    return int(count)


class _Member(ArrayFile):
    """A member of an .npz: a stream that is read forward and stays open."""

    def __init__(self, where: Where, axis: int | None, stream: "_Stream") -> None:
        super().__init__(where, stream.dtype, stream.shape, axis)
        self._stream = stream

    def _check(self) -> None:
        self._stream.check()

    def _rows(self, start: int, stop: int) -> Array:
        if self._stream.fortran or self.axis:
            return np.moveaxis(self._stream.whole, self.axis, 0)[start:stop]
        return self._stream.rows(start, stop)


class _Stream:
    def __init__(self, path: str, name: str) -> None:
        self._archive, self._name = zipfile.ZipFile(path), name
        self._file = self._archive.open(name)
        self.size = self._archive.getinfo(name).file_size
        self.shape, self.fortran, self.dtype = header(self._file)
        self.begin = self._file.tell()

    def rows(self, start: int, stop: int) -> Array:
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        return self._read((stop - start, *self.shape[1:]), start * row)

    def check(self) -> None:
        """Read all, so that `zipfile` compares the CRC-32, which it may not do after a seek."""
        with self._archive.open(self._name) as file:
            while file.read(_READ_BYTES):
                pass

    @cached_property
    def whole(self) -> Array:
        """The whole array: if the file's order is not that of the rows, all is needed."""
        array = self._read(self.shape[::-1] if self.fortran else self.shape, 0)
        return array.T if self.fortran else array

    def _read(self, shape: tuple[int, ...], offset: int) -> Array:
        array = np.empty(shape, self.dtype)
        self._file.seek(self.begin + offset)
        room = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        while room:
            content = self._file.read(min(len(room), _READ_BYTES))
            if not content:
                raise EOFError("the archive is cut off")
            room[: len(content)] = content
            room = room[len(content) :]
        return array


@lru_cache(maxsize=4)
def _stream(path: str, name: str, size: int, mtime_ns: int) -> _Stream:
    return _Stream(path, name)


atexit.register(_stream.cache_clear)  # closes the files
