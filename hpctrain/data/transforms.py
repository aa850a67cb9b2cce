"""Transforms of whole batches, on the device of the batch: no loop over samples.

    transform: Compose of RandomCrop(32, padding=4), RandomFlip(), Normalise()
    batch = bind(transform, index.statistics["train"])(batch, draws)

A transform is a callable (batch, draws) -> batch. It never writes into its input tensors, which may
be the loader's buffers, and it leaves other fields as they are. Random transforms take their
choices from `draws` (`hpctrain.data.draws`), so that a choice depends on the sample and the epoch,
not on ranks or devices. Fields that are named together, such as an image and its mask, get the same
choice. Images are (b, channels, height, width), of any dtype.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hpctrain.data.draws import Draws
from hpctrain.data.workers import samples
from hpctrain.errors import ConfigError, DataError
from hpctrain.shards.index import Statistics
from hpctrain.shards.types import Batch

Names = str | Sequence[str]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}


class Transform(Protocol):
    """The interface of a batch transform; see the module.

    A random transform has an attribute `random = True`: an evaluation leaves it out. `random =
    False` says that it never draws. Without the attribute it is tried (`hpctrain.data.randomness`).
    """

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Return the batch with the fields of this transform replaced."""


def bind(transform: Transform, statistics: Mapping[str, Statistics]) -> Transform:
    """Return `transform` with the statistics of the training split that it needs.

    If it needs some, it has a method `bind(statistics)`.
    """
    method = getattr(transform, "bind", None)
    return transform if method is None else method(statistics)


class Watched(samples.Watched):
    """The same for a transform of batches, such as `data.batch_transforms[0]`."""

    def __call__(self, batch: Batch, draws: Draws) -> Any:
        """Return what the transform returns; a ConfigError if it has drawn random numbers."""
        before = draws.drawn
        result = self._transform(batch, draws)
        self._check(draws.drawn != before, "batch")
        return result

    def bind(self, statistics: Mapping[str, Statistics]) -> "Watched":
        """See `bind`."""
        return Watched(bind(self._transform, statistics), self._key)


class Compose:
    """Applies transforms one after the other."""

    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = list(transforms)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        for transform in self.transforms:
            result: Any = transform(batch, draws)
            if not isinstance(result, dict) or not batch.keys() & {"mask"} <= result.keys():
                raise DataError(
                    f"the batch transform {transform} returned "
                    f"{', '.join(result) if isinstance(result, dict) else type(result).__name__}; "
                    "it must return the batch as a dict, with its mask"
                )
            batch = result
        return batch

    def bind(self, statistics: Mapping[str, Statistics]) -> "Compose":
        """See `bind`."""
        return Compose([bind(transform, statistics) for transform in self.transforms])


class Cast:
    """Converts fields to another dtype.

    Args:
        dtype: Name of the dtype, one of DTYPES.
        fields: The fields; "image" by default.

    Raises:
        ConfigError: The dtype is unknown.
    """

    random = False

    def __init__(self, dtype: str, fields: Names = "image") -> None:
        self._dtype, self._fields = _dtype(dtype), _names(fields)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        return batch | {name: _field(batch, name).to(self._dtype) for name in self._fields}


class Normalise:
    """Replaces x by (x - mean) / std.

    Args:
        mean: One number, or one for each channel, in the units of the field (0 to 255 for
            uint8). Without mean and std, `bind` takes both from the index.
        std: One number, or one for each channel, each above 0.
        fields: The fields; "image" by default.
        dtype: Floating-point dtype of the result. The arithmetic has this dtype, but at least
            float32.

    Raises:
        ConfigError: Only one of mean and std is given, their lengths differ, a std is not above
            0, or the dtype is not a floating-point one.
    """

    random = False

    def __init__(
        self,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        fields: Names = "image",
        dtype: str = "float32",
    ) -> None:
        self._dtype, self._fields = _dtype(dtype), _names(fields)
        if not self._dtype.is_floating_point:
            raise ConfigError(f"Normalise dtype {dtype!r}: it is a floating-point one")
        if (mean is None) != (std is None):
            raise ConfigError("Normalise needs both mean and std, or neither (those of the index)")
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        if mean is not None and std is not None:
            self._moments = dict.fromkeys(self._fields, _checked(mean, std))
        self._ready: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        return batch | {name: self._apply(name, _field(batch, name)) for name in self._fields}

    def bind(self, statistics: Mapping[str, Statistics]) -> "Normalise":
        """See `bind`; numbers that were given stay."""
        if self._moments:
            return self
        bound = copy.copy(self)
        bound._moments, bound._ready = {}, {}
        for name in self._fields:
            found = statistics.get(name)
            if found is None or found.mean is None or not found.std:
                raise DataError(
                    f"Normalise: the index has no usable mean and std of field {name!r} "
                    f"({found or 'it has ' + (', '.join(statistics) or 'none')}): give both"
                )
            bound._moments[name] = _checked(found.mean, found.std)
        return bound

    def _apply(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if name not in self._moments:
            raise ConfigError(f"Normalise of {name!r} has no mean and std: give them, or bind it")
        wide = torch.float32 if self._dtype.itemsize < 4 else self._dtype
        key = name, wide, values.device, values.ndim
        if key not in self._ready:
            shape = (-1, *[1] * (values.ndim - 2))
            mean, std = (numbers.to(wide) for numbers in self._moments[name])
            if mean.numel() > 1:
                if values.ndim < 2 or values.shape[1] != mean.numel():
                    raise ConfigError(
                        f"Normalise has {mean.numel()} channels, {name!r} is "
                        f"{list(values.shape)}: give one number, or one a channel (axis 1)"
                    )
                mean, std = mean.view(shape), std.view(shape)
            self._ready[key] = mean.to(values.device), (1 / std).to(values.device)
        mean, factor = self._ready[key]
        # The difference comes first: where the mean is large, the product would lose digits.
        return (values.to(wide) - mean).mul_(factor).to(self._dtype)


class RandomCrop:
    """Crops a window of `size` at a random place, the same for all fields of a sample.

    Args:
        size: Height and width, or one number for both.
        padding: Rows and columns that are added on every side first.
        fields: The fields, all of one height and width; "image" by default.
        fill: Value of the padding.

    Raises:
        ConfigError: A size is below 1, or the padding is below 0.
    """

    random = True

    def __init__(
        self,
        size: int | tuple[int, int],
        padding: int = 0,
        fields: Names = "image",
        fill: float = 0,
    ) -> None:
        self._size = (size, size) if isinstance(size, int) else (size[0], size[1])
        self._padding, self._fields, self._fill = padding, _names(fields), fill
        if min(self._size) < 1 or padding < 0:
            raise ConfigError(f"RandomCrop of size {size} and padding {padding}: >= 1 and >= 0")

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        images = {name: _image(batch, name) for name in self._fields}
        sizes = {name: tuple(image.shape[2:]) for name, image in images.items()}
        height, width = next(iter(sizes.values()))
        rows, columns = (
            have + 2 * self._padding - want
            for have, want in zip((height, width), self._size, strict=True)
        )
        if len(set(sizes.values())) > 1 or min(rows, columns) < 0:
            raise ConfigError(
                f"RandomCrop of {list(self._size)} with padding {self._padding}: the fields are "
                f"{sizes}; they must have one height and width, and hold the crop"
            )
        top, left = draws.integers(rows + 1), draws.integers(columns + 1)
        return batch | {name: self._crop(image, top, left) for name, image in images.items()}

    def _crop(self, images: torch.Tensor, top: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Gather the rows of the crops: each is the `width` pixels from its first one on."""
        if self._padding:
            images = F.pad(images, [self._padding] * 4, value=self._fill)
        b, channels, rows, columns = images.shape
        height, width = self._size
        pixels = images.reshape(-1)
        windows = pixels.as_strided((pixels.numel() - width + 1, width), (1, 1))
        corner = _sent(top * columns + left, images.device)

        def steps(count: int, size: int) -> torch.Tensor:
            return torch.arange(count, device=images.device) * size

        sample = steps(b, channels * rows * columns) + corner
        within = steps(channels, rows * columns)[:, None] + steps(height, columns)
        starts = (sample[:, None] + within.view(1, -1)).view(-1)
        found = windows.index_select(0, starts)
        return found.view(b, channels, height, width)


class CenterCrop:
    """Keeps the middle of images, for evaluations of a model that is trained on random crops.

    Args:
        size: Height and width of the middle.
        fields: The fields; "image" by default.
    """

    random = False

    def __init__(self, size: int, fields: Names = "image") -> None:
        self._size, self._fields = size, _names(fields)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        return batch | {name: self._crop(name, _image(batch, name)) for name in self._fields}

    def _crop(self, name: str, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        if not 1 <= self._size <= min(height, width):
            raise ConfigError(
                f"CenterCrop of size {self._size}: {name!r} is {height} x {width}; the crop is 1 "
                "or more, and within the image"
            )
        top, left = (height - self._size) // 2, (width - self._size) // 2
        return images[:, :, top : top + self._size, left : left + self._size]


class RandomFlip:
    """Mirrors samples left to right (or upside down) with probability `p`.

    Args:
        p: Probability, 0 to 1.
        fields: The fields, mirrored alike in a sample; "image" by default.
        axis: "width" (left to right) or "height".

    Raises:
        ConfigError: The probability or the axis is not one of these.
    """

    random = True

    def __init__(self, p: float = 0.5, fields: Names = "image", axis: str = "width") -> None:
        if not 0 <= p <= 1 or axis not in ("width", "height"):
            raise ConfigError(f"RandomFlip p={p}, axis={axis!r}: 0 to 1; 'width' or 'height'")
        self._p, self._fields, self._axis = p, _names(fields), -1 if axis == "width" else -2

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `Transform`."""
        chosen = (draws.uniform() < self._p).view(-1, 1, 1, 1)
        flipped = {}
        for name in self._fields:
            image = _image(batch, name)
            here = _sent(chosen, image.device)
            flipped[name] = torch.where(here, image.flip(self._axis), image)
        return batch | flipped


def _sent(choices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return choices of the CPU on the device of the batch; the host does not wait for a GPU.

    A copy to a GPU waits, whatever it is told, unless it is from pinned memory.
    """
    if device.type == "cuda":
        choices = choices.pin_memory()
    return choices.to(device, non_blocking=True)


def _names(fields: Names) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else tuple(fields)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r}: it is one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _field(batch: Batch, name: str) -> torch.Tensor:
    if name not in batch:
        raise ConfigError(f"a transform wants field {name!r}; the batch has {', '.join(batch)}")
    return batch[name]


def _image(batch: Batch, name: str) -> torch.Tensor:
    image = _field(batch, name)
    if image.ndim != 4:
        raise ConfigError(
            f"a transform wants images (b, channels, height, width); {name!r} is "
            f"{list(image.shape)}"
        )
    return image


def _checked(
    mean: float | Sequence[float], std: float | Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as float64, (1,) or (channels,)."""
    pair = [
        torch.tensor(x if isinstance(x, Sequence) else [x], dtype=torch.float64)
        for x in (mean, std)
    ]
    if pair[0].shape != pair[1].shape or not all(
        math.isfinite(m) and s > 0 for m, s in zip(*(x.tolist() for x in pair), strict=True)
    ):
        raise ConfigError(
            f"Normalise mean {mean} and std {std}: finite numbers, as many, every std above 0"
        )
    return pair[0], pair[1]
