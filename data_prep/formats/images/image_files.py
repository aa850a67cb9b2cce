"""Image files opened by Pillow: checks of their format, completeness, depth and transparency."""

import logging
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from data_prep.formats.samples import Unusable
from hpctrain.base.errors import ConfigError, DataError
from hpctrain.data.sources import images

# Also those of formats that are refused: such a file is an image that is missing, not another file.
SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".tif", ".tiff", ".webp", ".bmp", ".dib"),
        *(".gif", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".avif"),
    )
)
OTHERS = "read it in a function for `data_prep python` (tifffile, imageio)"
# Pillow also logs why it refuses a file; our message says it once, with the file's name.
logging.getLogger("PIL").setLevel(logging.CRITICAL)


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


def opened(content: bytes) -> Any:
    """Open an image and check its header."""
    try:
        image = images.opened(content)
    except DataError as error:
        raise Unusable(f"{error}; {OTHERS}") from None
    # An MPO file of a phone has variants of one picture.
    count = 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
    if count > 1:
        raise Unusable(f"it is an animation of {count} images; save each of them as a file")
    return image


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


def is_opaque(image: Any, content: bytes) -> bool:
    """Return whether nothing is lost when the loader drops the alpha channel."""
    if not has_alpha(image):
        return True
    with opened(content) as decoded:  # not `image`: its pixels must stay unread
        return least_alpha(decoded.convert("RGBA")) == 255
