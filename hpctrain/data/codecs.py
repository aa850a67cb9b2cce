"""HDF5's filters undone outside HDF5, whose library decodes one chunk at a time under its lock.

A chunk was written through a pipeline of filters; its stored bytes go back through it in reverse:

    filter          id     undone by           layout of the stored bytes
    deflate (gzip)  1      isal, or zlib       a zlib stream
    shuffle         2      blosc2, or numpy    all first bytes, all second bytes, …
    fletcher32      3      numpy               the data, then its checksum: verified
    LZ4             32004  lz4                 size u64, block size u32, {length u32, block}
    Zstd            32015  zstandard           a Zstandard frame
    Blosc           32001  blosc2              a Blosc chunk
    Blosc2          32026  blosc2              a contiguous frame of one chunk, in n-d blocks

All of them release the GIL, so that threads decode side by side; what cannot be shared between
threads (a Zstandard context) each thread has its own. Libraries are imported when a data set
needs them. Filters that are not in the table, or whose library is missing, are HDF5's business:
`Undecodable` says so.

The formats: HDF5 File Format Specification 3.0 (shuffle, Fletcher 32 as in H5checksum.c), the
registered filter plugins of the HDF Group (LZ4's numbers are big-endian), and c-blosc2's
README_CHUNK_FORMAT.rst and README_CFRAME_FORMAT.rst.
"""

import ctypes
import importlib
import math
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
LZ4, ZSTD, BLOSC, BLOSC2 = 32004, 32015, 32001, 32026


class Undecodable(Exception):
    """Only HDF5 itself can undo this pipeline; the message says why."""


class Damaged(Exception):
    """The stored bytes are not what the filters have written; the message says which, and how."""


class Filter(NamedTuple):
    """A filter of a dataset's pipeline, as `h5py.h5p.PropDCID.get_filter` describes it."""

    id: int
    flags: int
    values: tuple[int, ...]
    name: bytes


# (stored bytes, size of what comes out, where to write it if there) -> what comes out
Stage = Callable[[Bytes, int, Bytes | None], Bytes]


class Pipeline:
    """Undoes the filters of one dataset; threads may share it.

    Args:
        filters: In the order in which they were applied.
        nbytes: Of a whole chunk, decoded.

    Raises:
        Undecodable: A filter is unknown here or its library is missing.
    """

    def __init__(self, filters: Sequence[Filter], nbytes: int) -> None:
        self.nbytes = nbytes
        self._filters = tuple(filters)
        self._stages: list[tuple[Stage, tuple[type[Exception], ...]]] = []
        for each in self._filters:
            if each.id not in _STAGES:
                raise Undecodable(f"filter {_name(each)} is decoded by HDF5 only")
            self._stages.append(_STAGES[each.id](each.values))
        if sum(each.id not in (SHUFFLE, FLETCHER32) for each in self._filters) > 1:
            raise Undecodable("several compressors one after the other are decoded by HDF5 only")

    def decode(self, stored: Bytes, mask: int, out: Bytes) -> None:
        """Undo the filters of one chunk.

        Args:
            stored: Its bytes in the file.
            mask: Bit i is set where filter i was left out for this chunk.
            out: uint8 (nbytes,), filled.

        Raises:
            Damaged: The bytes cannot be decoded, or a checksum does not match.
        """
        applied = [i for i in range(len(self._filters)) if not mask >> i & 1]
        data = stored
        for i in reversed(applied):
            checksums = sum(self._filters[j].id == FLETCHER32 for j in applied if j < i)
            stage, errors = self._stages[i]
            try:
                data = stage(data, self.nbytes + 4 * checksums, out if i == applied[0] else None)
            except (Damaged, struct.error, *errors) as error:
                raise Damaged(f"{_name(self._filters[i])}: {error}") from None
        if len(data) != self.nbytes:
            raise Damaged(f"it holds {len(data)} bytes, not {self.nbytes}")
        if data is not out:
            out[:] = data


def _name(filter: Filter) -> str:
    return f"{filter.name.decode(errors='replace').split(';')[0] or 'without a name'} ({filter.id})"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Undecodable(f"the Python package {name.split('.')[0]} is not installed") from None


# Each makes the stage of a filter with the given parameters, and says what its library raises.


def _deflate(_: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    try:
        library = _library("isal.isal_zlib")  # twice as fast as zlib
    except Undecodable:
        library = zlib

    def stage(data: Bytes, size: int, _: Bytes | None) -> Bytes:
        return np.frombuffer(library.decompress(data, bufsize=size), np.uint8)

    return stage, (library.error,)


def _shuffle(values: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    (width,) = values
    fast = _blosc2_unshuffle()

    def stage(data: Bytes, _: int, out: Bytes | None) -> Bytes:
        if width == 1:
            return data
        target = out if out is not None and len(out) == len(data) else np.empty_like(data)
        if fast is not None and len(data) < 2**31:
            fast(width, len(data), data.ctypes.data, target.ctypes.data)
            return target
        count = len(data) // width
        for i in range(width):  # what is left of a last element stays in its place
            target[i : count * width : width] = data[i * count : (i + 1) * count]
        target[count * width :] = data[count * width :]
        return target

    return stage, ()


@cache
def _blosc2_unshuffle() -> Callable[[int, int, int, int], int] | None:
    """The vectorised one of c-blosc2, which its Python package does not export; or None.

    The GIL is released by ctypes. numpy's strided copies run at a tenth of its speed.
    """
    try:
        folder = Path(_library("blosc2").__file__).parent
        function = ctypes.CDLL(str(folder / "lib" / "libblosc2.so")).blosc2_unshuffle
    except (Undecodable, OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    return function  # type: ignore[no-any-return]


def _fletcher32(_: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    def stage(data: Bytes, _: int, __: Bytes | None) -> Bytes:
        if len(data) < 4:
            raise Damaged("the checksum is missing")
        stored, found = int.from_bytes(data[-4:].tobytes(), "little"), fletcher32(data[:-4])
        if stored != found:
            raise Damaged(f"the checksum is {stored:08x} in the file, {found:08x} of its data")
        return data[:-4]

    return stage, ()


def fletcher32(data: Bytes) -> int:
    """Return HDF5's checksum: two sums modulo 65535 over big-endian 16-bit words.

    Fletcher, "An arithmetic checksum for serial transmissions", IEEE Trans. Commun. 30(1), 1982.
    """
    block = 2**16  # words: the products below stay exact in float64, which BLAS sums
    length = -(-len(data) // 2) * 2
    words = np.zeros(max(1, -(-length // (2 * block))) * block, ">u2")
    # Zeros in front leave both sums as they are; an odd last byte is the high one of its word.
    words.view(np.uint8)[words.nbytes - length :][: len(data)] = data
    low = high = 0
    weights = np.arange(block, 0, -1, dtype=np.float64)
    for part in words.reshape(-1, block):
        values = part.astype(np.float64)
        high += block * low + int(values @ weights)
        low += int(values.sum())
    # Ones' complement: what is not zero never folds to zero.
    first, second = (value % 65535 or (65535 if value else 0) for value in (low, high))
    return second << 16 | first


def _lz4(_: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    library = _library("lz4.block")

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        total, step = struct.unpack_from(">QI", data)
        if total != size or not step:
            raise Damaged(f"it holds {total} bytes, not {size}")
        target = out if out is not None else np.empty(size, np.uint8)
        at = 12
        for start in range(0, size, step):
            wanted = target[start : start + step]
            (length,) = struct.unpack_from(">I", data, at)
            block = data[at + 4 : at + 4 + length]
            at += 4 + length
            if len(block) != len(wanted):  # else it is stored as it is
                raw = library.decompress(block, uncompressed_size=len(wanted))
                block = np.frombuffer(raw, np.uint8)
            if len(block) != len(wanted):
                raise Damaged(f"a block holds {len(block)} bytes, not {len(wanted)}")
            wanted[:] = block
        return target

    return stage, (library.LZ4BlockError,)


def _zstd(_: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    library, local = _library("zstandard"), threading.local()

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        if not hasattr(local, "context"):
            local.context = library.ZstdDecompressor()
        target = out if out is not None else np.empty(size, np.uint8)
        with local.context.stream_reader(data) as frame:
            count = frame.readinto(target)
            if count != size or frame.read(1):  # reads to the end: the frame's checksum
                raise Damaged(f"it does not hold {size} bytes")
        return target

    return stage, (library.ZstdError,)


def _blosc(values: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    library = _blosc2_library()
    if len(values) > 6 and values[6] == 3:
        raise Undecodable("Snappy inside Blosc is decoded by HDF5 only")

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        target = out if out is not None else np.empty(size, np.uint8)
        _blosc_chunk(library, data, target)
        return target

    return stage, (ValueError, RuntimeError)


def _blosc2(_: tuple[int, ...]) -> tuple[Stage, tuple[type[Exception], ...]]:
    library = _blosc2_library()

    def stage(data: Bytes, size: int, out: Bytes | None) -> Bytes:
        header, total = struct.unpack_from(">iQ", data, 11)[0], len(data)
        if struct.unpack_from(">Q", data, 16)[0] != total:
            raise Damaged(f"the frame is cut at {total} bytes")
        raw_size, raw_stored = struct.unpack_from(">q", data, 30)[0], 0
        raw_stored = struct.unpack_from(">q", data, 39)[0]
        frame = library.schunk_from_cframe(data)
        grid = frame.meta["b2nd"] if "b2nd" in frame.meta else None
        whole = out if grid is None and raw_size == size else None
        raw = whole if whole is not None else np.empty(raw_size, np.uint8)
        if raw_stored:
            _blosc_chunk(library, data[header:], raw)
        else:  # one value all over: there is no chunk in the frame
            frame.decompress_chunk(0, raw)
        if grid is None:
            return raw
        target = out if out is not None else np.empty(size, np.uint8)
        _from_blocks(raw, grid[3], grid[4], target)
        return target

    return stage, (ValueError, RuntimeError, KeyError)


def _blosc2_library() -> Any:
    library = _library("blosc2")
    library.set_releasegil(True)  # for the process: it is off by default
    return library


def _blosc_chunk(library: Any, chunk: Bytes, out: Bytes) -> None:
    """Decode a Blosc or Blosc2 chunk; the sizes are checked first, for the library trusts them."""
    size, _, stored = struct.unpack_from("<iii", chunk, 4)
    if size != len(out) or not 16 <= stored <= len(chunk):
        raise Damaged(f"{stored} bytes that hold {size}; there are {len(chunk)} for {len(out)}")
    library.decompress2(chunk, out, nthreads=1)


def _from_blocks(raw: Bytes, shape: Sequence[int], blocks: Sequence[int], out: Bytes) -> None:
    """Put Blosc2's n-dimensional blocks, each padded to the same size, in the order of C.

    Args:
        raw: The blocks one after the other, in C order, and C order within each.
        shape: Of the chunk, in elements.
        blocks: Shape of a block.
        out: The elements of the chunk.
    """
    counts = [-(-size // block) for size, block in zip(shape, blocks, strict=True)]
    padded = [count * block for count, block in zip(counts, blocks, strict=True)]
    width, rest = divmod(len(out), math.prod(shape))
    if rest or len(raw) != width * math.prod(padded):
        raise Damaged(f"blocks {list(blocks)} of a chunk {list(shape)} do not fill it")
    # A row of a block is one element: numpy then copies whole rows.
    row = np.dtype((np.void, width * blocks[-1]))
    rows = [*counts, *blocks[:-1]]
    axes = [axis for i in range(len(shape) - 1) for axis in (i, i + len(shape))]
    ordered = raw.view(row).reshape(rows).transpose([*axes, len(shape) - 1])
    if list(shape) == padded:
        out.view(row).reshape(ordered.shape)[...] = ordered
        return
    whole = np.ascontiguousarray(ordered).reshape(-1).view(np.uint8)
    whole = whole.reshape([*padded[:-1], padded[-1] * width])
    inside = tuple(slice(size) for size in shape[:-1])
    out.reshape([*shape[:-1], shape[-1] * width])[...] = whole[(*inside, slice(shape[-1] * width))]


_STAGES = {
    DEFLATE: _deflate,
    SHUFFLE: _shuffle,
    FLETCHER32: _fletcher32,
    LZ4: _lz4,
    ZSTD: _zstd,
    BLOSC: _blosc,
    BLOSC2: _blosc2,
}
