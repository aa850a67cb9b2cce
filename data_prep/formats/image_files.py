"""Image files as Pillow opens them: what they are, whether they are whole, what they hold."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from data_prep.formats.samples import Unusable
from hpctrain.data.images import FORMATS as LOADED
from hpctrain.errors import ConfigError

FORMATS = (*LOADED, "TIFF", "BMP")
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".tif", ".tiff", ".webp", ".bmp", ".dib")
)
BITS = 0x0102  # TIFF's tag


def pillow() -> Any:
    """Return Pillow's `Image`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "images need Pillow, which is not installed: pip install 'hpctrain[prep]'"
        ) from None
    return Image


@contextmanager
def reasons() -> Iterator[None]:
    """Pillow raises half a dozen kinds over damaged files; they all mean the same."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata; what spoils the pixels is raised
            yield
    except (Unusable, ConfigError, MemoryError):
        raise
    except Exception as error:
        what = str(error) or type(error).__name__
        raise Unusable(f"it cannot be decoded: {what}") from None


def opened(content: bytes, max_pixels: int) -> Any:
    """Return an image whose header is good.

    Raises:
        Unusable: It is not, or of another format, or has more pixels.
    """
    library = pillow()
    limit, library.MAX_IMAGE_PIXELS = library.MAX_IMAGE_PIXELS, None  # ours comes below
    try:
        image = library.open(io.BytesIO(content), formats=FORMATS)
    except library.UnidentifiedImageError:
        what = f"{len(content)} bytes" if content else "an empty file"
        raise Unusable(f"it is no JPEG, PNG, TIFF, WebP or BMP, but {what}") from None
    finally:
        library.MAX_IMAGE_PIXELS = limit
    if image.width * image.height > max_pixels:
        raise Unusable(
            f"its header says {image.height} x {image.width} pixels; --max-pixels is {max_pixels}"
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise Unusable(f"it is an animation or has several pages: {frames} images")
    return image


def is_deep(image: Any) -> bool:
    """Return whether it has more than 8 bits a channel; Pillow would cut colour down to 8."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return True
    if image.format == "TIFF":
        return bool(max(image.tag_v2.get(BITS, (1,))) > 8)
    # Ask before the pixels are loaded: a PNG forgets its tiles then.
    return image.format == "PNG" and ";16" in str(image.tile)


def grey16(image: Any) -> Any:
    """Return it in mode I, whose values are those of the file.

    Raises:
        Unusable: It has colours, or values beyond 16 bits.
    """
    if image.mode not in ("I", "I;16", "I;16B", "I;16L", "I;16N"):
        raise Unusable(f"it is not grey of 16 bits (Pillow's mode {image.mode}); store it as array")
    image = image.convert("I")
    low, high = image.getextrema()
    if low < 0 or high >= 2**16:
        raise Unusable(f"its values are {low} to {high}; --mode L16 takes 0 to 65535")
    return image


def check_end(image: Any, kind: str, content: bytes) -> None:
    """See that a JPEG or WebP is not cut off, without decoding it.

    Raises:
        Unusable: It is.
    """
    if kind == "JPEG":
        # No tile: it ends before the pixels. In the pixels neither marker can be, so the end has
        # to follow the last scan.
        if not image.tile or content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda"):
            raise Unusable("it is cut off: the end of the JPEG is missing")
    elif kind == "WEBP" and len(content) < int.from_bytes(content[4:8], "little") + 8:
        raise Unusable("it is cut off: the WebP is shorter than its header says")


def has_alpha(image: Any) -> bool:
    """Return whether it may have transparent pixels."""
    return image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info


def least_alpha(image: Any) -> int:
    """Return the least opacity in an image of mode RGBA, 0 to 255."""
    low: int = image.getchannel("A").getextrema()[0]
    return low


def is_opaque(image: Any, content: bytes, max_pixels: int) -> bool:
    """Return whether nothing is lost when the loader drops the alpha channel."""
    if not has_alpha(image):
        return True
    with opened(content, max_pixels) as decoded:  # of `image` nothing may be read before
        return least_alpha(decoded.convert("RGBA")) == 255
