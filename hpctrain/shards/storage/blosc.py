"""Decode the containers of Blosc (HDF5 filters 32001 and 32026) with the package blosc2.

The frame readers of the package hold the GIL while they decode, its decoder of chunks does not. So
this module takes the chunk out of the frame and decodes it alone, with one thread per call: on 2
cores, images of bytes with LZ4, 1,373 MB/s instead of 605. The formats are described in c-blosc2's
README_CHUNK_FORMAT.rst, README_CFRAME_FORMAT.rst and README_B2ND_METALAYER.rst.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from hpctrain.shards.storage.scratch import Bytes, Damaged, load, scratch


@cache
def library() -> Any:
    """Return the package, set to release the GIL in this process."""
    package = load("blosc2")
    package.set_releasegil(True)
    return package


@cache
def native(name: str, *arguments: Any) -> Callable[..., int] | None:
    """Return a function of the C library inside the package; None if it cannot be found.

    It takes addresses, and ctypes releases the GIL.
    """
    try:
        spec = find_spec("blosc2")  # without the import, which takes half a second
        folder = ((spec and spec.submodule_search_locations) or [""])[0]
        function = getattr(ctypes.CDLL(f"{folder}/lib/libblosc2.so"), name)
    except (ValueError, OSError, AttributeError):
        return None
    function.argtypes = arguments
    return function  # type: ignore[no-any-return]


def decode_chunk(chunk: Bytes, size: int, out: Bytes | None) -> Bytes:
    """Decode a Blosc or Blosc2 chunk, which may be changed, into `out` or a buffer of this thread.

    Damaged, ValueError and RuntimeError say that it cannot be decoded.
    """
    found, _, stored = struct.unpack_from("<iii", chunk.data, 4)
    if found != size or not 16 <= stored <= len(chunk):  # the library does not check them
        raise Damaged(f"{stored} bytes that hold {found}; there are {len(chunk)} for {size}")
    flags, width = int(chunk[2]), int(chunk[3])
    if width == 1 and flags & 1:
        # Shuffling elements of one byte changes nothing, but undoing it costs two thirds of the
        # speed. So clear the flag in the header.
        chunk = chunk if chunk.flags.writeable else chunk.copy()
        if flags & 4 and stored >= 32:  # the longer header of Blosc2 lists the filters
            filters = chunk[16:22]
            filters[filters == 1] = 0
        else:
            chunk[2] = flags & ~1
    target = out if out is not None else scratch("decoded", size)
    library().decompress2(chunk, target, nthreads=1)
    return target


def decode_frame(frame: Bytes, size: int, out: Bytes | None) -> Bytes:
    """Decode a contiguous frame of one chunk, which is flat or in n-dimensional blocks.

    It is as `decode_chunk`, but LookupError and TypeError, too, say that it cannot be decoded.
    """
    (header,) = struct.unpack_from(">i", frame.data, 11)
    (total,) = struct.unpack_from(">Q", frame.data, 16)
    (found,) = struct.unpack_from(">q", frame.data, 30)
    (stored,) = struct.unpack_from(">q", frame.data, 39)
    if total != len(frame) or not 0 < header < total or not size <= found < 2**31:
        raise Damaged(f"{total} bytes that hold {found}; there are {len(frame)} for {size}")
    opened = library().schunk_from_cframe(frame)
    grid = opened.meta["b2nd"] if "b2nd" in opened.meta else None  # noqa: SIM401
    raw = out if out is not None and grid is None and found == size else scratch("raw", found)
    if stored:
        decode_chunk(frame[header:], found, raw)
    else:  # all elements are equal: the frame has no chunk
        opened.decompress_chunk(0, raw)
    if grid is None:
        return raw
    target = out if out is not None else scratch("decoded", size)
    _from_blocks(raw, grid[3], grid[4], target)
    return target


def _from_blocks(raw: Bytes, shape: Sequence[int], blocks: Sequence[int], out: Bytes) -> None:
    """Copy the n-dimensional blocks of Blosc2, all padded to the same size, into C order."""
    if min(*shape, *blocks) < 1:
        raise Damaged(f"blocks {list(blocks)} of a chunk {list(shape)}")
    counts = [-(-size // block) for size, block in zip(shape, blocks, strict=True)]
    width, rest = divmod(len(out), math.prod(shape))
    if rest or len(raw) != width * math.prod(counts) * math.prod(blocks):
        raise Damaged(f"blocks {list(blocks)} of a chunk {list(shape)} do not fill it")
    if all(size % block == 0 for size, block in zip(shape, blocks, strict=True)):
        row = np.dtype((np.void, width * blocks[-1]))  # numpy copies one element at once
        axes = [axis for i in range(len(shape) - 1) for axis in (i, i + len(shape))]
        ordered = raw.view(row).reshape([*counts, *blocks[:-1]])
        ordered = ordered.transpose([*axes, len(shape) - 1])
        out.view(row).reshape(ordered.shape)[...] = ordered
        return
    # From here on in bytes: the last axis is `width` times as long.
    sizes, steps = [*shape[:-1], shape[-1] * width], [*blocks[:-1], blocks[-1] * width]
    target = out.reshape(sizes)
    for block, place in zip(raw.reshape(-1, *steps), np.ndindex(*counts), strict=True):
        part = target[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, steps, strict=True))]
        part[...] = block[tuple(slice(n) for n in part.shape)]
