"""How image files become samples: which are taken, in which mode, at which size.

Decoded by Pillow into uint8 (channels, height, width), or kept as they are for the loader.

- Formats: JPEG, PNG, TIFF, WebP, BMP, by their content. Animations and files of several pages
  cannot be used; of a phone's MPO the first image is taken.
- The EXIF orientation is applied, ICC profiles are ignored. Grey, palettes and CMYK are converted
  by Pillow's formulas, colour to grey by ITU-R 601.
- More than 8 bits a channel: only by --mode L16 (uint16, grey), never cut down to 8.
- Transparent pixels: kept by --mode RGBA, laid over --background, otherwise the image cannot be
  used, decoded or --encoded. An alpha channel that is opaque everywhere is dropped.
- --encoded keeps each file's bytes, orientation and all, as the loader decodes them later
  (hpctrain.data.images: JPEG, PNG, WebP; it applies the orientation too). Only the header and
  the file's end (of PNG: its checksums) are looked at. Together with --size, files of another
  size are decoded, resized and encoded again, JPEG as JPEG, all others as PNG.
"""

import argparse
import io
import re
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from data_prep.formats.image_files import (
    check_end,
    grey16,
    has_alpha,
    is_deep,
    is_opaque,
    least_alpha,
    opened,
    pillow,
    reasons,
)
from data_prep.formats.samples import Unusable
from hpctrain.data.field import Field
from hpctrain.data.images import FORMATS as LOADED
from hpctrain.data.images import MAX_PIXELS, orientation, planes, upright
from hpctrain.data.types import Array
from hpctrain.errors import ConfigError

MODES = {"RGB": 3, "L": 1, "RGBA": 4, "L16": 1}
RESIZE = ("crop", "pad", "stretch", "none")
FILTERS = ("bilinear", "bicubic", "lanczos", "box", "nearest")
DRAFT = 2  # times the target that a drafted JPEG still has


def add_arguments(parser: argparse.ArgumentParser, mode: str = "RGB") -> None:
    """Of the command line; `mode` is the default, see `Pixels`."""
    group = parser.add_argument_group("images")
    group.add_argument("--size", metavar="HxW", help="height and width; 64 is 64x64")
    group.add_argument(
        "--resize",
        choices=RESIZE,
        default="crop",
        help="to --size: crop: the shorter side is scaled, the middle kept; pad: the longer side "
        "is scaled, the rest filled; stretch: both; none: images of another size cannot be used "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--filter", choices=FILTERS, default="bilinear", help="of resizing (default: %(default)s)"
    )
    group.add_argument(
        "--mode", choices=MODES, help=f"of the pixels (default: {mode or 'that of the first'})"
    )
    group.add_argument(
        "--background", default="", metavar="COLOR", help="under transparent pixels and of `pad`"
    )
    group.add_argument(
        "--encoded", action="store_true", help="keep the files' bytes; the loader decodes"
    )
    group.add_argument(
        "--quality",
        type=int,
        default=95,
        metavar="1-95",
        help="of JPEGs that are encoded again (default: %(default)s)",
    )
    group.add_argument(
        "--max-pixels",
        type=int,
        default=MAX_PIXELS,
        metavar="N",
        help="larger images are not decoded: a few KB may hold many GB (default: %(default)s)",
    )
    group.add_argument(
        "--draft",
        action="store_true",
        help=f"decode JPEGs at 1/2, 1/4 or 1/8 where that leaves {DRAFT} times --size: faster, "
        "the pixels differ a little",
    )


@dataclass(frozen=True)
class Pixels:
    """What becomes of an image file; see the module.

    Attributes:
        size: Height and width, or None: as the file has it.
        resize: One of RESIZE.
        filter: One of FILTERS.
        mode: One of MODES, or "": L of grey images, RGB of all others.
        background: A colour as Pillow knows it, or "".
        encoded: The file's bytes are the sample.
        quality: Of JPEGs that are encoded again.
        max_pixels: Larger images cannot be used.
        draft: JPEGs may be decoded at a fraction of their size.
    """

    size: tuple[int, int] | None = None
    resize: str = "crop"
    filter: str = "bilinear"
    mode: str = "RGB"
    background: str = ""
    encoded: bool = False
    quality: int = 95
    max_pixels: int = MAX_PIXELS
    draft: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace, mode: str = "RGB") -> Self:
        """Take them from the command line; `mode` is the default.

        Raises:
            ConfigError: A value that is not allowed, or Pillow is not installed.
        """
        pillow()
        size = _size(args.size) if args.size else None
        if args.encoded and args.mode and (size is None or MODES[args.mode] == 4):
            raise ConfigError(f"--mode {args.mode}: with --encoded the loader decides it")
        if args.encoded and args.mode == "L16":
            raise ConfigError("--mode L16: the loader decodes 8 bits; leave out --encoded")
        if args.draft and size is None:
            raise ConfigError("--draft is for --size: JPEGs that are far larger")
        if not 1 <= args.quality <= 95:
            raise ConfigError(f"--quality {args.quality}: from 1 to 95")
        if args.max_pixels < 1:
            raise ConfigError(f"--max-pixels {args.max_pixels}: at least 1")
        if args.background:
            from PIL import ImageColor

            try:
                ImageColor.getrgb(args.background)
            except ValueError:
                raise ConfigError(
                    f"--background {args.background!r}: a colour such as white or #ff8800"
                ) from None
            if args.mode == "L16":
                raise ConfigError("--background: images of 16 bits have no transparent pixels")
        return cls(
            size=size,
            resize=args.resize,
            filter=args.filter,
            mode=args.mode or mode,
            background=args.background,
            encoded=args.encoded,
            quality=args.quality,
            max_pixels=args.max_pixels,
            draft=args.draft,
        )

    def identity(self) -> dict[str, Any]:
        """What the result depends on; JSON."""
        return asdict(self)

    @property
    def field(self) -> Field | None:
        """The field of the samples; None: the first image decides its shape."""
        if self.encoded:
            return Field("uint8", variable=True)
        if self.size is None or not self.mode:
            return None
        dtype = "uint16" if self.mode == "L16" else "uint8"
        return Field(dtype, (MODES[self.mode], *self.size))

    def sample(self, content: bytes, field: Field | None = None, out: Array | None = None) -> Array:
        """Return a file's sample.

        Args:
            content: The file.
            field: What it must be; None: it is the first, and decides.
            out: Where it may be made; not when encoded.

        Returns:
            uint8 or uint16 (channels, height, width), in `out` or not; encoded: uint8 (bytes,).

        Raises:
            Unusable: It is damaged, too large, or of a kind or size that is not taken.
        """
        if self.encoded:
            return np.frombuffer(self._file(content), np.uint8)
        with reasons(), opened(content, self.max_pixels) as image:
            pixels = self._array(self._resized(self._upright(image)), out)
        if field is not None and len(pixels) != field.shape[0]:
            raise Unusable(
                f"it has {_channels(len(pixels))}, the first image {_channels(field.shape[0])}; "
                "--mode makes them equal"
            )
        if field is not None and pixels.shape != field.shape:
            raise Unusable(
                f"it has {pixels.shape[1]} x {pixels.shape[2]} pixels, the first image "
                f"{field.shape[1]} x {field.shape[2]} (height x width); --size HxW makes them equal"
            )
        return pixels

    def convert(self, image: Any) -> Array:
        """Return the sample of an image that Pillow holds already; see `sample`.

        Raises:
            Unusable: See `sample`.
        """
        with reasons():
            if self.encoded:
                file = io.BytesIO()
                image.save(file, "PNG")
                return self.sample(file.getvalue())
            return self._array(self._resized(self._upright(image)))

    def _file(self, content: bytes) -> bytes:
        """What the loader decodes: the same, or encoded again."""
        with reasons(), opened(content, self.max_pixels) as image:
            kind = "JPEG" if image.format == "MPO" else image.format
            if is_deep(image):
                raise Unusable("it has more than 8 bits a channel, which the loader does not take")
            if self.size is None and kind not in LOADED:
                raise Unusable(
                    f"the loader decodes {', '.join(LOADED)}, not {kind}; leave out --encoded, or "
                    "--size encodes it again"
                )
            fits = self.size is None or (
                self.size == (image.height, image.width) and orientation(image) == 1
            )
            if kind in LOADED and fits and is_opaque(image, content, self.max_pixels):
                if kind == "PNG":
                    # All checksums; nothing may be read before.
                    opened(content, self.max_pixels).verify()
                check_end(image, kind, content)
                return content
        # Opened again: reading the EXIF may have moved it.
        with reasons(), opened(content, self.max_pixels) as image:
            file = io.BytesIO()
            resized = self._resized(self._upright(image))
            if kind == "JPEG":
                resized.save(file, "JPEG", quality=self.quality)
            else:
                resized.save(file, "PNG")
            return file.getvalue()

    def _upright(self, image: Any) -> Any:
        """The decoded image, as it is to be looked at, in its mode or in that of the result."""
        deep = is_deep(image)
        if self.draft and self.size and image.format in ("JPEG", "MPO"):
            height, width = self.size[::-1] if orientation(image) > 4 else self.size
            if self.resize == "pad":
                height, width = _inside((height, width), (image.height, image.width))
            image.draft(None, (DRAFT * width, DRAFT * height))
        image.load()
        if deep != (self.mode == "L16"):
            raise Unusable(
                f"it has more than 8 bits a channel (Pillow's mode {image.mode}): --mode L16 "
                "takes grey of 16 bits; store others as arrays"
                if deep
                else "it has 8 bits a channel, --mode L16 takes 16"
            )
        image = upright(image, orientation(image))
        if self.mode == "L16":
            return grey16(image)
        mode = self.mode or ("L" if image.mode in ("1", "L", "LA", "La") else "RGB")
        if has_alpha(image):
            image = image.convert("RGBA")
            if self.mode == "RGBA":
                return image
            if least_alpha(image) < 255:
                if not self.background:
                    other = "" if self.encoded else ", --mode RGBA keeps them"
                    raise Unusable(
                        "it has transparent pixels: --background white lays them over a colour"
                        f"{other}"
                    )
                below = pillow().new("RGBA", image.size, self.background)
                image = pillow().alpha_composite(below, image)
            image = image.convert("RGB")
        return image if image.mode == mode else image.convert(mode)

    def _resized(self, image: Any) -> Any:
        if self.size is None or (image.height, image.width) == self.size:
            return image
        height, width = self.size
        resample = pillow().Resampling[self.filter.upper()]
        if self.resize == "none":
            raise Unusable(
                f"it has {image.height} x {image.width} pixels, not {height} x {width} (height x "
                "width), and --resize is none"
            )
        if self.resize == "stretch":
            return image.resize((width, height), resample)
        if self.resize == "crop":
            scale = min(image.width / width, image.height / height)
            left = max(0.0, (image.width - scale * width) / 2)  # rounding: a little below 0
            top = max(0.0, (image.height - scale * height) / 2)
            box = (left, top, image.width - left, image.height - top)
            return image.resize((width, height), resample, box=box)
        inner = _inside(self.size, (image.height, image.width))
        padded = pillow().new(image.mode, (width, height), self.background or 0)
        place = (width - inner[1]) // 2, (height - inner[0]) // 2
        padded.paste(image.resize(inner[::-1], resample), place)
        return padded

    def _array(self, image: Any, out: Array | None = None) -> Array:
        if self.mode == "L16":
            deep = np.asarray(image).clip(0, 2**16 - 1)  # a sharp filter overshoots
            return deep.astype(np.uint16)[None]
        shape = (len(image.getbands()), image.height, image.width)
        return planes(image, out if out is not None and out.shape == shape else None)


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", text)
    if not match or 0 in (size := (int(match[1]), int(match[2] or match[1]))):
        raise ConfigError(f"--size {text!r}: height and width in pixels, such as 224x224")
    return size


def _inside(size: tuple[int, int], found: tuple[int, int]) -> tuple[int, int]:
    """The largest size with the proportions of `found` that fits in `size`."""
    scale = min(size[0] / found[0], size[1] / found[1])
    height, width = (max(1, round(side * scale)) for side in found)
    return height, width
