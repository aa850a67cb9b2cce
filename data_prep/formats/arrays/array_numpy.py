"""Arrays in .npy files and files of raw numbers; see `array_base`."""

import math
import mmap
import os
import re
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.arrays.array_base import (
    FORMS,
    SLAB_BYTES,
    ArrayFile,
    Where,
    check_dtype,
)
from data_prep.formats.opening import way
from hpctrain.errors import ConfigError, DataError
from hpctrain.mounts import kind_of
from hpctrain.shards.storage.scratch import Undecodable, load
from hpctrain.shards.types import Array

try:
    _crc32 = load("isal.isal_zlib").crc32  # seven times as fast as zlib's
except Undecodable:
    _crc32 = zlib.crc32

POPULATE_READ = 22  # an advice of madvise(2), Linux 5.14; Python has no name for it yet
LEAST_BYTES = 2**16  # smaller reads are as fast with a copy
_STRIDE = 2**14  # bytes: runs closer together than this are read with the bytes between them
_STRIP_BYTES = 8 * 2**20  # size of such a read
VERSIONS = ((1, 0), (2, 0), (3, 0))  # of a .npy file
_READ_BYTES = 2**20  # bytes that are read at once for a checksum


def open_npy(where: Where, axis: int | None, external: bool, opened: ExitStack) -> ArrayFile:
    """Open a .npy file."""
    if where.key:
        raise ConfigError(f"{where}: a .npy file holds one array, and takes no key")
    return npy_at(where, axis, opened, 0, os.stat(where.path).st_size)


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


def npy_at(
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
        shape, fortran, dtype = header(file)
        begin = file.tell()
    check_dtype(where, dtype)
    check_size(where, dtype.itemsize * math.prod(shape), size - (begin - offset))
    checksum = None if crc is None else (offset, size, crc)
    return _Flat(where, dtype, shape, axis, opened, begin, fortran, checksum)


def check_size(where: Where, needed: int, found: int) -> None:
    """Compare the bytes of an array with those that are there."""
    if needed > found:
        raise DataError(
            f"{where} is truncated: its header says {needed:,} bytes of data, {found:,} are there"
        )
    if needed < found:
        raise DataError(
            f"{where} has {found - needed:,} bytes behind its array: save one array in a file"
        )


def header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
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


class Mapped:
    """A read-only memory map of a file, where the system and the file system allow one.

    It saves a copy: an .npy of 1 GB converts about twice as fast. Reading mapped pages that are no
    longer in the file would end the process with SIGBUS. So the pages are first loaded by a system
    call that returns an error instead. A file that is cut off after that call and before the bytes
    are written makes `write` fail, not the process.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._map: mmap.mmap | None = None
        # A network file system would load mapped pages one by one; large reads are faster there.
        if os.fstat(descriptor).st_size >= LEAST_BYTES and kind_of(Path(path)) != "network":
            try:
                self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                self._map.madvise(POPULATE_READ, 0, 1)
            except (OSError, ValueError):  # an older system, or not an ordinary file
                self._map = None

    def bytes(self, start: int, size: int) -> NDArray[np.uint8] | None:
        """Return bytes of the file, read-only; None if the caller has to read them itself."""
        if self._map is None or size < LEAST_BYTES:
            return None
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(POPULATE_READ, page, start + size - page)
        return np.frombuffer(self._map, np.uint8, size, start)


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

    def _check(self) -> None:
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
        room = memoryview(bytes_of(run))
        while room:
            count = os.preadv(self._file, [room], offset)
            if not count:
                raise DataError(f"{self.where.path} was cut off while it was being read")
            room, offset = room[count:], offset + count


def bytes_of(array: Array) -> Any:
    """Return a contiguous array's memory as uint8."""
    return array.reshape(-1).view(np.uint8)
