"""How image files become samples.

Pillow decodes the images into uint8 (channels, height, width). With --encoded their bytes are kept,
and the loader decodes them.

- Formats: JPEG, PNG and WebP, recognised by their content. Others, and animations, cannot be used.
  Of an MPO file from a phone, the first image is taken.
- The EXIF orientation is applied. ICC profiles are ignored. Grey, palette and CMYK images are
  converted by Pillow's formulas; colour is converted to grey by ITU-R 601.
- Grey PNGs of 16 bits need --mode L16 (uint16). Colours of 16 bits cannot be used: they are never
  cut to 8 bits.
- Transparent pixels are kept by --mode RGBA. Otherwise the image cannot be used. An alpha channel
  that is opaque everywhere is dropped.
- --encoded keeps each file's bytes, with their orientation, which the loader applies when it
  decodes them (JPEG, PNG, WebP). The conversion checks only the header and the end of the file (all
  checksums of a PNG). With --size, images of another size are decoded, resized and encoded again:
  JPEG as JPEG, all others as PNG.
"""

import argparse
import io
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from data_prep.formats.images.image_files import (
    OTHERS,
    check_whole,
    has_alpha,
    is_opaque,
    least_alpha,
    opened,
    reasons,
)
from data_prep.formats.samples import Unusable
from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.types import Array
from hpctrain.data.sources.images import is_deep, orientation, pillow, planes, upright

_MODES = {"RGB": 3, "L": 1, "RGBA": 4, "L16": 1}
_QUALITY = 95  # of JPEGs that are encoded again


OPTIONS = f"""
[images]
--size HxW
    height and width of the samples; 64 means 64x64
--resize {{crop,pad,stretch}} = crop
    how images are resized to --size. crop: scale the shorter side, keep the middle; pad: scale the
    longer side, fill the rest with 0; stretch: scale both sides
--mode {{{",".join(_MODES)}}}
    mode of the pixels (default: RGB)
--encoded
    keep the bytes of the files; the loader decodes them
"""


@dataclass(frozen=True)
class Pixels:
    """How image files become samples; see the module."""

    size: tuple[int, int] | None = None  # height and width; None keeps the size of each file
    resize: str = "crop"  # crop, pad or stretch
    mode: str = "RGB"  # one of _MODES
    encoded: bool = False  # whether a sample is the bytes of the file

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Make the pixels that the command line describes."""
        pillow()
        size = _size(args.size) if args.size else None
        if args.encoded and args.mode and (size is None or _MODES[args.mode] == 4):
            raise ConfigError(f"--mode {args.mode}: with --encoded the loader decides it")
        if args.encoded and args.mode == "L16":
            raise ConfigError(f"--mode {args.mode}: the loader decodes 8 bits; leave out --encoded")
        return cls(size, args.resize, args.mode or "RGB", args.encoded)

    @property
    def field(self) -> Field | None:
        """The field of the samples; None if the first image decides its shape."""
        if self.encoded:
            return Field("uint8", variable=True)
        if self.size is None:
            return None
        dtype = "uint16" if self.mode == "L16" else "uint8"
        return Field(dtype, (_MODES[self.mode], *self.size))

    def field_of(self, first: Array) -> Field:
        """Return the field of the samples, whose first one is `first`."""
        return self.field or Field(first.dtype.name, first.shape)

    def sample(self, content: bytes, field: Field | None = None) -> Array:
        """Return the sample of an image file.

        It is uint8 or uint16 (channels, height, width); if encoded, uint8 (bytes,).
        """
        if self.encoded:
            return np.frombuffer(self._file(content), np.uint8)
        with reasons(), opened(content) as image:
            if image.format == "PNG":
                check_whole(image, "PNG", content)
            image = self._resized(self._upright(image))
            deep = self.mode == "L16"
            pixels = np.asarray(image).astype(np.uint16)[None] if deep else planes(image)
        if field is not None and pixels.shape != field.shape:
            raise Unusable(
                f"it has {pixels.shape[1]} x {pixels.shape[2]} pixels, the first image "
                f"{field.shape[1]} x {field.shape[2]} (height x width); --size HxW makes them "
                "equal; docs/data.md says how to keep sizes (Samples of different shapes)"
            )
        return pixels

    def _file(self, content: bytes) -> bytes:
        """Return the bytes for the loader: those of the file, or the image encoded again."""
        with reasons(), opened(content) as image:
            kind = "JPEG" if image.format == "MPO" else image.format
            if is_deep(image):
                raise Unusable("it has more than 8 bits a channel, which the loader does not take")
            fits = self.size is None or (
                self.size == (image.height, image.width) and orientation(image) == 1
            )
            if fits and is_opaque(image, content):
                check_whole(image, kind, content)
                return content
        # Open the file again: reading the EXIF data may have moved the position in it.
        with reasons(), opened(content) as image:
            file = io.BytesIO()
            resized = self._resized(self._upright(image))
            if kind == "JPEG":
                resized.save(file, "JPEG", quality=_QUALITY)
            else:
                resized.save(file, "PNG")
            return file.getvalue()

    def _upright(self, image: Any) -> Any:
        """Decode an image, apply its orientation, and convert it to the mode of the samples."""
        deep = is_deep(image)
        image.load()
        if deep != (self.mode == "L16"):
            raise Unusable(
                f"it has more than 8 bits a channel (Pillow's mode {image.mode}): --mode L16 "
                "takes grey of 16 bits; store colours as arrays"
                if deep
                else "it has 8 bits a channel, --mode L16 takes 16"
            )
        upright(image)
        if self.mode == "L16":
            if not image.mode.startswith("I"):
                raise Unusable(f"it is not grey of 16 bits (Pillow's mode {image.mode}); {OTHERS}")
            return image.convert("I")  # which keeps the values of the file
        if has_alpha(image):
            image = image.convert("RGBA")
            if self.mode == "RGBA":
                return image
            if least_alpha(image) < 255:
                keep = "" if self.encoded else "--mode RGBA keeps them, or "
                raise Unusable(f"it has transparent pixels: {keep}lay it over a colour before")
            image = image.convert("RGB")
        return image if image.mode == self.mode else image.convert(self.mode)

    def _resized(self, image: Any) -> Any:
        if self.size is None or (image.height, image.width) == self.size:
            return image
        from PIL import ImageOps

        pad = partial(ImageOps.pad, color=0)
        how = {"crop": ImageOps.fit, "pad": pad, "stretch": pillow().Image.resize}
        # The bilinear filter smooths when it shrinks.
        return how[self.resize](image, self.size[::-1], pillow().Resampling.BILINEAR)


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", text)
    if not match or 0 in (size := (int(match[1]), int(match[2] or match[1]))):
        raise ConfigError(f"--size {text!r}: height and width in pixels, such as 224x224")
    return size
