"""Readers of arrays in .npy files, .npz files and files of raw numbers; see `array_base`."""

import atexit
import math
import os
import re
import struct
import zipfile
import zlib
from contextlib import ExitStack
from functools import cached_property, lru_cache
from typing import IO, Any

import numpy as np

from data_prep.formats.arrays.array_base import (
    FORMS,
    SLAB_BYTES,
    ArrayFile,
    Where,
    check_dtype,
    choose,
    reading,
)
from data_prep.formats.arrays.mapped import Mapped
from data_prep.formats.opening import way
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.storage.scratch import Undecodable, load
from hpctrain.shards.types import Array

try:
    _crc32 = load("isal.isal_zlib").crc32  # seven times as fast as zlib's
except Undecodable:
    _crc32 = zlib.crc32

_STRIDE = 2**14  # bytes: runs closer together than this are read with the bytes between them
_STRIP_BYTES = 8 * 2**20  # size of such a read
VERSIONS = ((1, 0), (2, 0), (3, 0))  # of a .npy file
_READ_BYTES = 2**20  # bytes that are read at once of a stream, or for a checksum
_END_BYTES = 22 + 2**16  # size of the end of a zip file at most: its record and a comment
MANY = 2**16 - 1


def open_npy(where: Where, axis: int | None, external: bool, opened: ExitStack) -> ArrayFile:
    """Open a .npy file."""
    if where.key:
        raise ConfigError(f"{where}: a .npy file holds one array, and takes no key")
    return _npy(where, axis, opened, 0, os.stat(where.path).st_size)


def open_npz(where: Where, axis: int | None, external: bool, opened: ExitStack) -> ArrayFile:
    """Open a member of a .npz file."""
    name = choose(where, dict.fromkeys(npz_names(where.path), "")) + ".npy"
    found = os.stat(where.path)
    with zipfile.ZipFile(where.path) as archive:
        info = archive.getinfo(name)
        if info.flag_bits & 1:
            raise DataError(f"{where} is encrypted")
        archive.open(name).close()  # zipfile compares the header with the list
        if info.compress_type == zipfile.ZIP_STORED:
            with open(where.path, "rb") as file:
                file.seek(info.header_offset + 26)  # the lengths of name and extra field
                lengths = np.frombuffer(file.read(4), "<u2")
            offset = info.header_offset + 30 + int(lengths.sum())
            return _npy(where, axis, opened, offset, info.file_size, info.CRC)
    stream = _stream(where.path, name, found.st_size, found.st_mtime_ns)
    check_dtype(where, stream.dtype)
    needed = stream.dtype.itemsize * math.prod(stream.shape)
    _check_size(where, needed, info.file_size - stream.begin)
    return _Member(where, axis, stream)


def open_raw(where: Where, axis: int | None, external: bool, opened: ExitStack) -> ArrayFile:
    """Open a file of raw numbers, whose key is DTYPE:SHAPE:SKIP."""
    if not where.key:
        raise ConfigError(
            f"{where.path}: {way(where.path) or f'its name does not say what it is; {FORMS}'}"
        )
    match = re.fullmatch(r"([^:]+)(?::(\d+(?:x\d+)*)?)?(?::(\d+))?", where.key)
    try:
        dtype = np.dtype(match[1] if match else "")
    except TypeError:
        match = None
    if match is None:
        raise ConfigError(
            f"{where}: raw numbers are FILE:DTYPE:SHAPE of one sample, such as u.bin:float32:3x64 "
            "(then :SKIP, bytes of a header); other formats go by the file's ending"
        )
    if axis:
        raise ConfigError(f"--axis: in {where.path} samples follow each other, so it is 0")
    check_dtype(where, dtype)
    sample = tuple(int(size) for size in match[2].split("x")) if match[2] else ()
    size, skip = os.stat(where.path).st_size, int(match[3] or 0)
    row = dtype.itemsize * math.prod(sample)
    if not row:
        raise ConfigError(f"{where}: every size of a shape is at least 1")
    if size < skip or (size - skip) % row:
        raise DataError(
            f"{where} has {size - skip:,} bytes{f' behind the first {skip:,}' * bool(skip)}, which "
            f"is no multiple of a sample's {row:,}: another shape or dtype, or it is truncated"
        )
    return _Flat(where, dtype, ((size - skip) // row, *sample), axis, opened, skip)


def _npy(
    where: Where,
    axis: int | None,
    opened: ExitStack,
    offset: int,
    size: int,
    crc: int | None = None,
) -> ArrayFile:
    """Open the .npy content of `size` bytes at a byte offset of a file, with its CRC-32 if any."""
    with open(where.path, "rb") as file:
        file.seek(offset)
        shape, fortran, dtype = _header(file)
        begin = file.tell()
    check_dtype(where, dtype)
    _check_size(where, dtype.itemsize * math.prod(shape), size - (begin - offset))
    checksum = None if crc is None else (offset, size, crc)
    return _Flat(where, dtype, shape, axis, opened, begin, fortran, checksum)


def _check_size(where: Where, needed: int, found: int) -> None:
    if needed > found:
        raise DataError(
            f"{where} is truncated: its header says {needed:,} bytes of data, {found:,} are there"
        )
    if needed < found:
        raise DataError(
            f"{where} has {found - needed:,} bytes behind its array: save one array in a file"
        )


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the array is in Fortran order, and the dtype."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:
        raise ValueError("it does not begin as a NumPy file does") from None
    if version not in VERSIONS:
        raise ValueError(f"its format is of version {version[0]}.{version[1]}, not 1.0 to 3.0")
    of = np.lib.format
    read = of.read_array_header_2_0 if version > (1, 0) else of.read_array_header_1_0
    try:
        shape, fortran, dtype = read(file)
    except Exception as error:  # NumPy evaluates the header as Python, which may raise anything
        raise ValueError(f"its header is damaged: {error}") from None
    if any(size < 0 for size in shape):
        raise ValueError(f"its header says shape {shape}")
    return shape, fortran, dtype


class _Flat(ArrayFile):
    """Numbers without gaps in a file: .npy, an uncompressed member of .npz, or raw numbers."""

    def __init__(
        self,
        where: Where,
        dtype: Any,
        shape: tuple[int, ...],
        axis: int | None,
        opened: ExitStack,
        offset: int,
        fortran: bool = False,
        checksum: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(where, dtype, shape, axis)
        # In the file's order: (outer, samples, inner). Each of the `outer` runs has `inner` values
        # of every sample.
        self._reversed = fortran
        self._shape = shape[::-1] if fortran else shape
        self._axis = len(shape) - 1 - self.axis if fortran else self.axis
        self._outer = math.prod(self._shape[: self._axis])
        self._inner = math.prod(self._shape[self._axis + 1 :])
        self._offset, self._checksum = offset, checksum
        if self._outer > 1:  # needs many short reads: read as many rows at once as memory allows
            self._chunk = max(1, SLAB_BYTES // 2 // self._row_bytes)
        self._count = self._rows_shape[0]
        self._file = os.open(where.path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, self._file)
        self._mapped = Mapped(where.path, self._file)

    def check(self) -> None:
        if self._checksum is None:
            return
        (start, size, listed), found = self._checksum, 0
        buffer = np.empty(min(size, _READ_BYTES), np.uint8)
        for at in range(0, size, _READ_BYTES):
            part = buffer[: size - at]
            self._fill(part, start + at)
            found = _crc32(part, found)
        if found != listed:
            raise DataError(
                f"{self.where} is damaged: its content has the CRC-32 {found:08x}, the archive "
                f"says {listed:08x}"
            )

    def _rows(self, start: int, stop: int) -> Array:
        size = self.dtype.itemsize * self._inner
        if self._outer == 1:
            found = self._map(self._offset + start * size, (stop - start) * size)
            if found is not None:
                return self._turned(found, stop - start)
        array = np.empty((self._outer, stop - start, self._inner), self.dtype)
        stride = size * self._count
        if self._outer > 1 and stride <= _STRIDE:
            many = _STRIP_BYTES // stride
            for outer in range(0, self._outer, many):
                part = array[outer : outer + many]
                strip = np.empty((len(part), self._count, self._inner), self.dtype)
                self._fill(strip, self._offset + outer * stride)
                part[:] = strip[:, start:stop]
        else:
            for outer, run in enumerate(array):
                self._fill(run, self._offset + outer * stride + start * size)
        return self._turned(array, stop - start)

    def _turned(self, values: Array, count: int) -> Array:
        """Return the values of so many samples, in the file's order, as (count, *sample)."""
        before, after = self._shape[: self._axis], self._shape[self._axis + 1 :]
        values = values.reshape(*before, count, *after)
        return np.moveaxis(values.T if self._reversed else values, self.axis, 0)

    def _map(self, offset: int, size: int) -> Array | None:
        """Return values in the memory map, or None if they have to be read."""
        if offset % self.dtype.itemsize:
            return None
        try:
            found = self._mapped.bytes(offset, size)
        except OSError:
            if os.fstat(self._file).st_size < offset + size:
                raise DataError(f"{self.where.path} was cut off while it was being read") from None
            raise
        return None if found is None else found.view(self.dtype)

    def _fill(self, run: Array, offset: int) -> None:
        room = memoryview(_bytes(run))
        while room:
            count = os.preadv(self._file, [room], offset)
            if not count:
                raise DataError(f"{self.where.path} was cut off while it was being read")
            room, offset = room[count:], offset + count


class _Member(ArrayFile):
    """A compressed member of an .npz: a stream that is read forward and stays open."""

    def __init__(self, where: Where, axis: int | None, stream: "_Stream") -> None:
        super().__init__(where, stream.dtype, stream.shape, axis)
        self._stream = stream

    def check(self) -> None:
        with reading(self.where):
            self._stream.check()

    def _rows(self, start: int, stop: int) -> Array:
        if self._stream.fortran or self.axis:
            return np.moveaxis(self._stream.whole, self.axis, 0)[start:stop]
        return self._stream.rows(start, stop)


class _Stream:
    def __init__(self, path: str, name: str) -> None:
        self._archive = zipfile.ZipFile(path)
        self._file = self._archive.open(name)
        self.shape, self.fortran, self.dtype = _header(self._file)
        self.begin = self._file.tell()

    def rows(self, start: int, stop: int) -> Array:
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        return self._read((stop - start, *self.shape[1:]), start * row)

    def check(self) -> None:
        """Read all, so that `zipfile` compares the CRC-32."""
        self._file.seek(0)
        while self._file.read(_READ_BYTES):
            pass

    @cached_property
    def whole(self) -> Array:
        """The whole array: if the file's order is not that of the rows, all is needed."""
        array = self._read(self.shape[::-1] if self.fortran else self.shape, 0)
        return array.T if self.fortran else array

    def _read(self, shape: tuple[int, ...], offset: int) -> Array:
        array = np.empty(shape, self.dtype)
        self._file.seek(self.begin + offset)
        room = memoryview(_bytes(array))
        while room:
            content = self._file.read(min(len(room), _READ_BYTES))
            if not content:
                raise EOFError("the archive is cut off")
            room[: len(content)] = content
            room = room[len(content) :]
        return array


def _bytes(array: Array) -> Any:
    return array.reshape(-1).view(np.uint8)


@lru_cache(maxsize=4)
def _stream(path: str, name: str, size: int, mtime_ns: int) -> _Stream:
    return _Stream(path, name)


atexit.register(_stream.cache_clear)  # closes the files


def npz_names(path: str) -> list[str]:
    """Return the keys of an .npz."""
    with reading(Where(path)):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        listed = _listed_members(path)
    if listed not in (MANY, len(names)):  # a damaged length can hide members
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
    """Return the number of members that the end of a zip file says; MANY is any number."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END_BYTES))
        end = file.read()
    (count,) = struct.unpack_from("<H", end, end.rindex(b"PK\5\6") + 10)
    return int(count)
