"""Encoded images: a variable-length uint8 field that holds JPEG, PNG or WebP files.

Pillow decodes them in threads; its decoders run without the GIL.

    >>> source = Decoded(Reader(folder, "train"), "image", size=(224, 224))
    >>> source.fields["image"]
    Field(dtype='uint8', shape=(3, 224, 224), variable=False)

The EXIF orientation is applied. An alpha channel is dropped, and colours of a palette are looked
up. Grey is repeated.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import ConfigError, DataError
from hpctrain.base.forks import PerProcess
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.source import SampleId, Source

Size = tuple[int, int]  # height, width
_Fit = Literal["exact", "crop", "stretch"]

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_PIXELS = 2**26  # of one image: 8,192 x 8,192; a file of a few KB may decode to many GB
_ORIENTATION = 0x0112  # EXIF's tag


def decode(
    images: Ragged,
    *,
    size: Size | None = None,
    fit: _Fit = "exact",
    samples: Sequence[int] | None = None,
    pool: ThreadPoolExecutor | None = None,
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Decode n >= 1 files into uint8 (n, 3, height, width), in `out` if it is given.

    `size` is (height, width); None: that of the first image. Images of another size are an error if
    `fit` is "exact". "crop" scales the shorter side and keeps the middle, "stretch" scales both, by
    Pillow's bilinear filter, which smooths when it shrinks.
    Images of more than MAX_PIXELS are refused before they are decoded. `samples` are the indices
    in the data set, for messages. The threads of `pool` share the work; None: this thread decodes.
    """
    pillow()
    names = range(len(images)) if samples is None else samples
    height, width = size or _size(images[0], names[0])
    pixels = np.empty((len(images), 3, height, width), np.uint8) if out is None else out

    def one(i: int) -> None:
        with _open(images[i], names[i]) as image:
            fitted = _fitted(image, (height, width), fit, names[i])
            planes(fitted, pixels[i])

    run: Any = map if pool is None else pool.map
    for _ in run(one, range(len(images))):  # raises their exceptions
        pass
    return pixels


class Decoded(PerProcess, Source):
    """A source that decodes a field of encoded images.

    `field` is uint8 of variable length. `decode` explains the other arguments; without a size all
    images have that of sample 0. `threads`, at least 1, decode a batch together.
    """

    OWN = ("_pool",)

    def __init__(
        self,
        source: Source,
        field: str,
        *,
        size: Size | None = None,
        fit: _Fit = "exact",
        threads: int = 4,
    ) -> None:
        pillow()
        if source.fields.get(field) != Field("uint8", variable=True):
            known = ", ".join(f"{name} {spec}" for name, spec in source.fields.items())
            raise DataError(f"field {field!r} holds no encoded images, uint8[*]; there are {known}")
        if size is None:
            first: Any = source.read(np.zeros(1, np.int64))[field]
            size = _size(first[0], 0)
        self.fields = dict(source.fields) | {field: Field("uint8", (3, *size))}
        self._source, self._field, self._threads = source, field, threads
        self._options: dict[str, Any] = {"size": size, "fit": fit}
        super().__init__()

    def _begin(self) -> None:
        # Threads start with the first task.
        self._pool = (
            ThreadPoolExecutor(self._threads, "hpctrain-images") if self._threads > 1 else None
        )

    def __len__(self) -> int:
        return len(self._source)

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> dict[str, Array | Ragged]:
        """Return the samples `indices`, in that order; see `hpctrain.data.source.Source`."""
        others = out and {name: array for name, array in out.items() if name != self._field}
        rows = dict(self._source.read(indices, others))
        images: Any = rows[self._field]
        options = self._options | {"samples": indices.tolist(), "pool": self._pool}
        pixels = None if out is None else out[self._field]
        rows[self._field] = decode(images, **options, out=pixels)
        return rows

    def sample_ids(self, indices: Int64s) -> list[SampleId]:
        """See `Source`."""
        return self._source.sample_ids(indices)

    def prepare(self, indices: Int64s) -> None:
        """See `Source`."""
        self._source.prepare(indices)

    def read_ahead(self, blocks: Int64s) -> None:
        """See `Source`."""
        self._source.read_ahead(blocks)


def pillow() -> Any:
    """Return Pillow's module `Image`."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "encoded images need Pillow, which is not installed: pip install 'hpctrain[images]'"
        ) from None
    return Image


def opened(content: bytes) -> Any:
    """Return a Pillow image whose header has been read and checked.

    A DataError says why "it" is not decoded. What Pillow raises for damaged files passes.
    """
    library = pillow()
    try:
        image = library.open(io.BytesIO(content), formats=FORMATS)
    except library.UnidentifiedImageError:
        raise DataError(f"it is no JPEG, PNG or WebP, but {len(content)} bytes") from None
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"its header says {image.height} x {image.width} pixels; at most {MAX_PIXELS:,} are "
            "decoded, because a file of a few KB can need many GB of memory"
        )
    return image


def _open(content: Array, sample: int) -> Any:
    """Open an image of 8 bits a channel."""
    with _decoding(sample):
        image = opened(content.tobytes())
    if is_deep(image):
        raise DataError(
            f"the image of sample {sample} has more than 8 bits a channel (mode {image.mode!r}): "
            "store such images as arrays"
        )
    return image


def is_deep(image: Any) -> bool:
    """Return whether an image has more than 8 bits a channel: Pillow would cut colours to 8.

    This must be called before the pixels are loaded: loading clears the tiles, which say it of a
    PNG's colours.
    """
    return image.mode[0] in "IF" or (image.format == "PNG" and ";16" in str(image.tile))


def _size(content: Array, sample: int) -> Size:
    with _open(content, sample) as image, _decoding(sample):
        upright(image)
        return image.height, image.width


def planes(image: Any, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Return a Pillow image of 8 bits as uint8 (channels, height, width), in `out` if given."""
    bands = image.getbands()
    if out is None:
        out = np.empty((len(bands), image.height, image.width), np.uint8)
    for plane, band in zip(out, bands, strict=True):
        # It takes half the time of reading all channels at once and transposing a copy.
        plane[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(plane.shape)
    return out


def orientation(image: Any) -> int:
    """Return the EXIF orientation of a Pillow image, 1 to 8; other values in the file become 1."""
    found = image.getexif().get(_ORIENTATION, 1)
    return found if found in range(1, 9) else 1


def upright(image: Any) -> None:
    """Decode a Pillow image, and turn it upright."""
    from PIL import ImageOps

    ImageOps.exif_transpose(image, in_place=True)


@contextmanager
def _decoding(sample: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # in a PNG, EXIF data may stand behind damaged pixels
        raise DataError(f"the image of sample {sample} cannot be decoded: {error}") from None


def _fitted(image: Any, size: Size, fit: _Fit, sample: int) -> Any:
    """Return the decoded image, in RGB and of `size`."""
    with _decoding(sample):
        if fit != "exact":  # a JPEG is decoded at 1/2, 1/4 or 1/8 of its size: twice as fast
            image.draft("RGB", size if orientation(image) > 4 else size[::-1])
        image = image.convert("RGB")
        upright(image)
    if fit == "exact" and (image.height, image.width) != size:
        raise DataError(
            f"the image of sample {sample} is {image.height} x {image.width}, not "
            f"{size[0]} x {size[1]}: give a size, and fit 'crop' or 'stretch'"
        )
    height, width = size
    left, top, right, bottom = 0.0, 0.0, float(image.width), float(image.height)
    if fit == "crop":
        scale = min(right / width, bottom / height)
        left = max(0.0, (right - scale * width) / 2)  # rounding: a little below 0
        top = max(0.0, (bottom - scale * height) / 2)
        right, bottom = right - left, bottom - top
    if (image.height, image.width) == size:
        return image
    bilinear = pillow().Resampling.BILINEAR
    return image.resize((width, height), bilinear, box=(left, top, right, bottom))
