"""Blosc's containers, as HDF5's filters 32001 and 32026 store them, by the Python package blosc2.

Its ready-made readers hold the GIL while they decode a frame; this goes to the chunk inside, whose
decoder releases it, with one thread for each call. The formats: c-blosc2's
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

from hpctrain.data.storage.scratch import Bytes, Damaged, load, scratch


@cache
def library() -> Any:
    """Return the package, which releases the GIL from now on in this process.

    Raises:
        Undecodable: It is not installed.
    """
    package = load("blosc2")
    package.set_releasegil(True)
    return package


@cache
def native(name: str, *arguments: Any) -> Callable[..., int] | None:
    """Return a function of the C library that the package carries; None where it cannot be had.

    It takes addresses, and ctypes releases the GIL. c-blosc2 documents `blosc2_unshuffle`; LZ4 it
    carries inside.

    Args:
        name: Of the function.
        arguments: Their ctypes.
    """
    try:
        spec = find_spec("blosc2")  # not imported: that takes half a second
        folder = ((spec and spec.submodule_search_locations) or [""])[0]
        function = getattr(ctypes.CDLL(f"{folder}/lib/libblosc2.so"), name)
    except (ValueError, OSError, AttributeError):
        return None
    function.argtypes = arguments
    return function  # type: ignore[no-any-return]


def decode_chunk(chunk: Bytes, size: int, out: Bytes | None) -> Bytes:
    """Decode a Blosc or Blosc2 chunk.

    Args:
        chunk: uint8; may be changed.
        size: Of what it holds.
        out: uint8 (size,), filled and returned; None: this thread's scratch.

    Raises:
        Damaged, ValueError, RuntimeError: It cannot be decoded.
    """
    found, _, stored = struct.unpack_from("<iii", chunk.data, 4)
    if found != size or not 16 <= stored <= len(chunk):  # the library trusts both
        raise Damaged(f"{stored} bytes that hold {found}; there are {len(chunk)} for {size}")
    flags, width = int(chunk[2]), int(chunk[3])
    if width == 1 and flags & 1:
        # To shuffle single bytes is to leave them, at a third of the speed: say that none were.
        chunk = chunk if chunk.flags.writeable else chunk.copy()
        if flags & 4 and stored >= 32:  # the longer header of Blosc2, with its list of filters
            filters = chunk[16:22]
            filters[filters == 1] = 0
        else:
            chunk[2] = flags & ~1
    target = out if out is not None else scratch("decoded", size)
    library().decompress2(chunk, target, nthreads=1)
    return target


def decode_frame(frame: Bytes, size: int, out: Bytes | None) -> Bytes:
    """Decode a contiguous frame of one chunk, flat or in n-dimensional blocks; see above.

    Raises:
        Damaged, ValueError, RuntimeError, LookupError, TypeError: It cannot be decoded.
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
    else:  # one value all over: there is no chunk in the frame
        opened.decompress_chunk(0, raw)
    if grid is None:
        return raw
    target = out if out is not None else scratch("decoded", size)
    _from_blocks(raw, grid[3], grid[4], target)
    return target


def _from_blocks(raw: Bytes, shape: Sequence[int], blocks: Sequence[int], out: Bytes) -> None:
    """Put Blosc2's n-dimensional blocks, each padded to the same size, in the order of C.

    Args:
        raw: The blocks one after the other, in C order, and C order within each.
        shape: Of the chunk, in elements.
        blocks: Shape of a block.
        out: The elements of the chunk.
    """
    if min(*shape, *blocks) < 1:
        raise Damaged(f"blocks {list(blocks)} of a chunk {list(shape)}")
    counts = [-(-size // block) for size, block in zip(shape, blocks, strict=True)]
    width, rest = divmod(len(out), math.prod(shape))
    if rest or len(raw) != width * math.prod(counts) * math.prod(blocks):
        raise Damaged(f"blocks {list(blocks)} of a chunk {list(shape)} do not fill it")
    if all(size % block == 0 for size, block in zip(shape, blocks, strict=True)):
        row = np.dtype((np.void, width * blocks[-1]))  # one element: numpy copies it at once
        axes = [axis for i in range(len(shape) - 1) for axis in (i, i + len(shape))]
        ordered = raw.view(row).reshape([*counts, *blocks[:-1]])
        ordered = ordered.transpose([*axes, len(shape) - 1])
        out.view(row).reshape(ordered.shape)[...] = ordered
        return
    # In bytes from here on: the last axis is `width` times as long.
    sizes, steps = [*shape[:-1], shape[-1] * width], [*blocks[:-1], blocks[-1] * width]
    target = out.reshape(sizes)
    for block, place in zip(raw.reshape(-1, *steps), np.ndindex(*counts), strict=True):
        part = target[tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, steps, strict=True))]
        part[...] = block[tuple(slice(n) for n in part.shape)]
