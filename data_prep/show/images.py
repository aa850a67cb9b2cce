"""Recognise fields of images and of image files, and turn samples into pixels to draw."""

import numpy as np

from hpctrain.shards.field import Field
from hpctrain.shards.types import Array

SIGNATURES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n": "PNG", b"RIFF": "WebP", b"BM": "BMP"}


def is_text(field: Field) -> bool:
    """Return whether a field may hold text or files, which are sequences of bytes."""
    return field.variable and field.dtype == "uint8" and not field.shape


def as_image(value: Array, field: Field) -> Array | None:
    """Return a sample as uint8 (H, W, C), or None if it is no image.

    An image is uint8 (H, W), or uint8 (C, H, W) with 1, 3 or 4 channels.
    """
    if field.dtype != "uint8" or field.variable:
        return None
    if len(field.shape) == 2 and min(field.shape) > 1:
        return value[:, :, None]
    if len(field.shape) == 3 and field.shape[0] in (1, 3, 4):
        return np.moveaxis(value, 0, 2)
    return None


def stretched(image: Array, field_max: float | None = None) -> Array:
    """Stretch a dark grey image, such as a digit with values 0 to 16, to the range 0 to 255."""
    high = int(image.max()) if field_max is None else int(field_max)
    if image.shape[2] > 1 or not 0 < high <= 127:
        return image
    return np.asarray(np.minimum(image.astype(np.float32) * (255 / high), 255), np.uint8)
