"""Undo the filters of HDF5 outside HDF5, whose library decodes one chunk at a time under its lock.

A chunk was written through a pipeline of filters, and is read through it in reverse order:

    filter          id     undone by           layout of the stored bytes
    deflate (gzip)  1      isal, or zlib       a zlib stream
    shuffle         2      blosc2, or numpy    all first bytes, all second bytes, …
    LZ4             32004  lz4                 size u64, block size u32, {length u32, block}
    Zstd            32015  zstandard           a Zstandard frame

All of these release the GIL, so threads decode at the same time. A library is imported only when a
data set needs it. Filters that are not in the table, or whose library is missing, are left to HDF5;
`Undecodable` says so.

The formats: HDF5 File Format Specification 3.0 (shuffle), and the registered filter plugins of the
HDF Group (the numbers of LZ4 are big-endian).
"""

import ctypes
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_void_p
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from hpctrain.data.shards.storage.file import (
    Bytes,
    Damaged,
    Errors,
    Stage,
    Undecodable,
    load,
    scratch,
)

PIECE = 65_536  # bytes of a zlib stream

DEFLATE, SHUFFLE, LZ4, ZSTD = 1, 2, 32004, 32015
NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 32000: "lzf", 32008: "bitshuffle"}
NAMES |= {32013: "zfp", LZ4: "lz4", ZSTD: "zstd", 32001: "blosc", 32026: "blosc2"}


class Filter(NamedTuple):
    """A filter of a dataset's pipeline, as `h5py.h5p.PropDCID.get_filter` describes it."""

    id: int
    flags: int
    values: tuple[int, ...]
    name: bytes


class Pipeline:
    """Undoes the filters of one dataset, in the order in which they were applied.

    Threads may share it. `nbytes` is that of a whole decoded chunk.
    """

    def __init__(self, filters: Sequence[Filter], nbytes: int) -> None:
        self.nbytes = nbytes
        self._filters = tuple(filters)
        self._stages: list[tuple[Stage, Errors]] = []
        for each in self._filters:
            if each.id not in _STAGES:
                raise Undecodable(f"filter {describe(each)} is decoded by HDF5 only")
            stage, errors = _STAGES[each.id](each.values)
            self._stages.append((stage, (Damaged, struct.error, *errors)))
        numbers = [each.id for each in self._filters]
        if len(set(numbers)) < len(numbers) or len(set(numbers) - {SHUFFLE}) > 1:
            raise Undecodable("several compressors one after the other are decoded by HDF5 only")

    def applied(self, mask: int) -> list[int]:
        """Return the numbers of the filters that a chunk went through: bit i is set if not i."""
        return [i for i in range(len(self._filters)) if not mask >> i & 1]

    def decode(self, stored: Bytes, mask: int, out: Bytes) -> None:
        """Undo the filters of one chunk, whose stored bytes may be changed, into `out`."""
        applied, data = self.applied(mask), stored
        for i in reversed(applied):
            stage, errors = self._stages[i]
            try:
                data = stage(data, self.nbytes, out if i == applied[0] else None)
            except errors as error:
                raise Damaged(f"{describe(self._filters[i])}: {error}") from None
        if len(data) != self.nbytes:
            raise Damaged(f"it holds {len(data)} bytes, not {self.nbytes}")
        if data is not out:
            out[:] = data


def codec(filter: Filter) -> str:
    """Return a filter's usual name, or else the name that the file gives it."""
    written = filter.name.decode(errors="replace").partition("\0")[0].partition(";")[0]
    return NAMES.get(filter.id) or written or "without a name"


def describe(filter: Filter) -> str:
    """Return a filter's name and number."""
    return f"{codec(filter)} ({filter.id})"


@cache
def _native_unshuffle() -> Callable[..., int] | None:
    """Return the function of the C library inside the package blosc2; None if it cannot be found.

    It takes addresses, and ctypes releases the GIL.
    """
    try:
        spec = find_spec("blosc2")  # without the import, which takes half a second
        folder = ((spec and spec.submodule_search_locations) or [""])[0]
        function = ctypes.CDLL(f"{folder}/lib/libblosc2.so").blosc2_unshuffle
    except (ValueError, OSError, AttributeError):
        return None
    function.argtypes = (c_int32, c_int32, c_void_p, c_void_p)
    return function


# Each function below takes the parameters of a filter. It returns the stage that undoes the filter,
# and the exceptions that the stage's library raises.


def _deflate(_: tuple[int, ...]) -> tuple[Stage, Errors]:
    try:
        library = load("isal.isal_zlib")  # twice as fast as zlib
    except Undecodable:
        library = zlib

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        target = out if out is not None else scratch("decoded", size)
        # In pieces that stay in the processor's cache. The whole output would be fresh memory.
        stream, at = library.decompressobj(), 0
        for start in range(0, len(data), PIECE):
            piece = np.frombuffer(stream.decompress(data[start : start + PIECE]), np.uint8)
            if len(piece) > size - at:
                raise Damaged(f"it holds more than {size} bytes")
            target[at : at + len(piece)] = piece
            at += len(piece)
        if not stream.eof or at < size:
            raise Damaged(f"it ends after {at} bytes of {size}")
        return target

    return stage, (library.error,)


def _shuffle(values: tuple[int, ...]) -> tuple[Stage, Errors]:
    (width,) = values
    fast = _native_unshuffle()

    def stage(data: Bytes, _: int, out: Bytes | None) -> Bytes:
        if width == 1:
            return data
        target = out if out is not None else scratch("unshuffled", len(data))
        if len(target) != len(data):
            raise Damaged(f"it holds {len(data)} bytes, not {len(target)}")
        if fast is not None and len(data) < 2**31:
            fast(width, len(data), data.ctypes.data, target.ctypes.data)
            return target
        count = len(data) // width
        for i in range(width):  # the bytes of an incomplete last element stay in place
            target[i : count * width : width] = data[i * count : (i + 1) * count]
        target[count * width :] = data[count * width :]
        return target

    return stage, ()


def _lz4(_: tuple[int, ...]) -> tuple[Stage, Errors]:
    library = load("lz4.block")

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        total, step = struct.unpack_from(">QI", data.data)
        if total != size or not step:
            raise Damaged(f"it holds {total} bytes, not {size}")
        target = out if out is not None else scratch("decoded", size)
        at = 12
        for start in range(0, size, step):
            target_block = target[start : start + step]
            (length,) = struct.unpack_from(">I", data.data, at)
            block = data[at + 4 : at + 4 + length]
            at += 4 + length
            if len(block) == len(target_block):  # stored without compression
                target_block[:] = block
                continue
            raw = library.decompress(block, uncompressed_size=len(target_block))
            if len(raw) != len(target_block):
                raise Damaged(f"a block holds {len(raw)} bytes, not {len(target_block)}")
            target_block[:] = np.frombuffer(raw, np.uint8)
        return target

    return stage, (library.LZ4BlockError,)


def _zstd(_: tuple[int, ...]) -> tuple[Stage, Errors]:
    library, local = load("zstandard"), threading.local()

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        if not hasattr(local, "context"):
            local.context = library.ZstdDecompressor()
        target = out if out is not None else scratch("decoded", size)
        with local.context.stream_reader(data) as frame:
            count = frame.readinto(target)
            # Read to the end, so that the checksum of the frame is verified.
            if count != size or frame.read(1):
                raise Damaged(f"it does not hold {size} bytes")
        return target

    return stage, (library.ZstdError,)


_STAGES = {DEFLATE: _deflate, SHUFFLE: _shuffle, LZ4: _lz4, ZSTD: _zstd}
