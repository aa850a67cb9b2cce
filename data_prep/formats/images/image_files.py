"""Image files opened by Pillow: checks of their format, completeness, depth and transparency."""

import ctypes
import io
import logging
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.samples import Unusable
from data_prep.libraries import library
from hpctrain.data.sources.images import FORMATS as LOADED
from hpctrain.errors import ConfigError

FORMATS = (*LOADED, "TIFF", "BMP", "GIF", "JPEG2000", "AVIF")
SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".tif", ".tiff", ".webp", ".bmp", ".dib"),
        *(".gif", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".avif"),
    )
)
PAGES = ("refuse", "first", "all")  # of an animation, or of a file with several pages
_BITS = 0x0102  # the TIFF tag of the bits per channel
_KIND = 0x0106  # the TIFF tag of the colours: 0 is grey of which 0 is white
# Pillow keeps one byte of two. With the bytes in the other order, it keeps the other one.
SWAPPED = {
    f"{mode};16{order}": f"{mode};16{'B' if order != 'B' else 'L'}"
    for mode in ("RGB", "RGBA")
    for order in "LBN"
}


def pillow() -> Any:
    """Return Pillow's module `Image`."""
    image = library("PIL.Image", "an image", name="Pillow", error=ConfigError)
    # Pillow also logs why it refuses a file; our message says it once, with the file's name.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    _silence_libtiff()
    return image


@lru_cache(maxsize=1)
def _silence_libtiff() -> None:
    """Let libtiff print nothing: it writes to stderr by itself, before Pillow raises an error."""
    with suppress(OSError, AttributeError):  # not Linux, or a Pillow without this library
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(maxsplit=5)[-1] for line in maps if "/libtiff" in line}:
            library = ctypes.CDLL(path)
            library.TIFFSetErrorHandler(None)
            library.TIFFSetWarningHandler(None)


@contextmanager
def reasons() -> Iterator[None]:
    """Turn the many kinds of errors that Pillow raises for damaged files into `Unusable`."""
    try:
        with warnings.catch_warnings():
            # Pillow warns about metadata; it raises an error if the pixels are affected.
            warnings.simplefilter("ignore")
            yield
    except (Unusable, ConfigError, MemoryError):
        raise
    except Exception as error:
        what = str(error) or type(error).__name__
        raise Unusable(f"it cannot be decoded: {what}") from None


def opened(content: bytes, max_pixels: int, pages: str = "refuse") -> Any:
    """Open an image and check its header."""
    library = pillow()
    library.init()
    formats = [name for name in FORMATS if name in library.OPEN]  # an old Pillow has no AVIF
    limit, library.MAX_IMAGE_PIXELS = library.MAX_IMAGE_PIXELS, None  # our own check is below
    try:
        image = library.open(io.BytesIO(content), formats=formats)
    except library.UnidentifiedImageError:
        what = f"{len(content)} bytes" if content else "an empty file"
        raise Unusable(
            f"it is no JPEG, PNG, TIFF, WebP, BMP, GIF, JPEG 2000 or AVIF, but {what}"
        ) from None
    finally:
        library.MAX_IMAGE_PIXELS = limit
    if image.width * image.height > max_pixels:
        raise Unusable(
            f"its header says {image.height} x {image.width} pixels; --max-pixels is {max_pixels}"
        )
    check_depth(image.format, content)
    count = page_count(image)
    if count > 1 and pages == "refuse":
        raise Unusable(
            f"it is an animation or has several pages: {count} images; --pages first takes the "
            "first one, --pages all takes all of them as one sample"
        )
    if pages == "all" and image.width * image.height * count > max_pixels:
        raise Unusable(
            f"it has {count} pages of {image.height} x {image.width} pixels; --max-pixels is "
            f"{max_pixels}"
        )
    return image


def page_count(image: Any) -> int:
    """Return the number of pages; 1 for an MPO file of a phone, which has variants of a picture."""
    return 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))


def is_deep(image: Any) -> bool:
    """Return whether an image has more than 8 bits a channel: Pillow would cut colours to 8."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return True
    if image.format == "TIFF":
        return bool(max(image.tag_v2.get(_BITS, (1,))) > 8)
    # This must be called before the pixels are loaded: loading a PNG clears its tiles.
    return image.format == "PNG" and ";16" in str(image.tile)


def check_depth(kind: str, content: bytes) -> None:
    """Check that Pillow would neither cut nor scale the values of an AVIF or JPEG 2000."""
    bits = [8]
    if kind == "AVIF":
        # The third byte of the decoder's configuration has the bit `high_bitdepth`.
        box = content.find(b"av1C")
        if box >= 0 and content[box + 6] & 0x40:
            bits = [10]
    elif kind == "JPEG2000":
        start = content.find(b"\xff\x4f\xff\x51")  # the marker SIZ, with the bits of each channel
        count = int.from_bytes(content[start + 40 : start + 42])
        bits = [1 + (each & 0x7F) for each in content[start + 42 : start + 42 + 3 * count : 3]]
    if max(bits, default=8) > 8 and bits != [16]:
        allowed = "8 bits" if kind == "AVIF" else "8 bits, and grey of 16 bits"
        raise Unusable(
            f"it has {max(bits)} bits a channel or more, and Pillow would change the values; of "
            f"{kind}, {allowed} can be used. Store it as an array"
        )


def colours16(image: Any, content: bytes, max_pixels: int) -> list[Any]:
    """Return red, green and blue of 16 bits, each as an image of mode I."""
    tiles = []
    for tile in image.tile if image.format in ("TIFF", "PNG") else ():
        raw, *rest = (tile.args,) if isinstance(tile.args, str) else tile.args
        if raw in SWAPPED:
            swapped = SWAPPED[raw]
            tiles.append(tile._replace(args=(swapped, *rest) if rest else swapped))
    if not tiles or len(tiles) != len(image.tile):
        raise Unusable(
            f"it is a {image.format} of Pillow's mode {image.mode}; --mode RGB16 takes TIFF and "
            "PNG with three channels of 16 bits. Store it as an array"
        )
    with opened(content, max_pixels, "first") as other:
        if page_count(other) > 1:
            other.seek(image.tell())
        other.tile = tiles
        low = np.asarray(other).astype(np.int32)
    values = np.asarray(image).astype(np.int32) * 256 + low
    if "transparency" in image.info or (values[..., 3:] != 2**16 - 1).any():
        raise Unusable("it has transparent pixels, which --mode RGB16 does not take")
    return [pillow().fromarray(np.ascontiguousarray(values[..., i])) for i in range(3)]


def is_negative(image: Any) -> bool:
    """Return whether 0 is white in an image of 16 bits: Pillow returns its values as they are."""
    is_tiff16 = image.mode.startswith("I;16") and image.format == "TIFF"
    return bool(is_tiff16 and image.tag_v2.get(_KIND) == 0)


def grey16(image: Any, negative: bool) -> Any:
    """Convert an image to mode I, which keeps the values of the file."""
    if image.mode not in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        raise Unusable(
            f"it is not grey of 16 bits (Pillow's mode {image.mode}); --mode RGB16 takes colours "
            "of TIFF and PNG, store others as arrays"
        )
    image = image.convert("I")
    low, high = image.getextrema()
    if low < 0 or high >= 2**16:
        raise Unusable(f"its values are {low} to {high}; --mode L16 takes 0 to 65535")
    return image.point(lambda value: value * -1 + 65535) if negative else image


def check_whole(image: Any, kind: str, content: bytes) -> None:
    """Check the checksums of a PNG, and that a JPEG or WebP is not cut off, without decoding it."""
    if kind == "PNG":
        _check_chunks(memoryview(content))
    elif kind == "JPEG":
        # Without a tile, the file ends before the pixels. Neither marker can occur in the pixels,
        # so the end marker has to be behind the last start-of-scan marker.
        if not image.tile or content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda"):
            raise Unusable("it is cut off: the end of the JPEG is missing")
    elif kind == "WEBP" and len(content) < int.from_bytes(content[4:8], "little") + 8:
        raise Unusable("it is cut off: the WebP is shorter than its header says")


def _check_chunks(content: memoryview) -> None:
    """Check all checksums of a PNG. Pillow does not check those of the pixels."""
    at, kind = 8, b""
    while kind != b"IEND":
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        kind = bytes(content[at + 4 : at + 8])
        if end + 4 > len(content):
            raise Unusable("it is cut off: the end of the PNG is missing")
        if zlib.crc32(content[at + 4 : end]) != int.from_bytes(content[end : end + 4], "big"):
            raise Unusable(
                f"it is damaged: the checksum of its part {kind.decode('latin-1')!r} is another one"
            )
        at = end + 4


def has_alpha(image: Any) -> bool:
    """Return whether an image may have transparent pixels."""
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def least_alpha(image: Any) -> int:
    """Return the least opacity in an image of mode RGBA, 0 to 255."""
    low: int = image.getchannel("A").getextrema()[0]
    return low


def is_opaque(image: Any, content: bytes, max_pixels: int) -> bool:
    """Return whether nothing is lost when the loader drops the alpha channel."""
    if not has_alpha(image):
        return True
    with opened(content, max_pixels) as decoded:  # not `image`: its pixels must stay unread
        return least_alpha(decoded.convert("RGBA")) == 255
