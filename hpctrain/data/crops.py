"""Crops and flips of images, which are (b, channels, height, width) of any dtype."""

import torch
import torch.nn.functional as F

from hpctrain.base.errors import ConfigError
from hpctrain.data.batch_fields import Names, OfFields, image_of
from hpctrain.data.draws import Draws
from hpctrain.data.shards.types import Batch


class RandomCrop(OfFields):
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
        super().__init__(fields)
        self._size = (size, size) if isinstance(size, int) else (size[0], size[1])
        self._padding, self._fill = padding, fill
        if min(self._size) < 1 or padding < 0:
            raise ConfigError(f"RandomCrop of size {size} and padding {padding}: >= 1 and >= 0")

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `hpctrain.data.transforms.Transform`."""
        images = {name: image_of(batch, name) for name in self._fields}
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


class CenterCrop(OfFields):
    """Keeps the middle of images, for evaluations of a model that is trained on random crops.

    `size` is the height and the width of the middle.
    """

    def __init__(self, size: int, fields: Names = "image") -> None:
        super().__init__(fields)
        self._size = size

    def _changed(self, name: str, values: torch.Tensor) -> torch.Tensor:
        images = image_of({name: values}, name)
        height, width = images.shape[2:]
        if not 1 <= self._size <= min(height, width):
            raise ConfigError(
                f"CenterCrop of size {self._size}: {name!r} is {height} x {width}; the crop is 1 "
                "or more, and within the image"
            )
        top, left = (height - self._size) // 2, (width - self._size) // 2
        return images[:, :, top : top + self._size, left : left + self._size]


class RandomFlip(OfFields):
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
        super().__init__(fields)
        self._p, self._axis = p, -1 if axis == "width" else -2

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `hpctrain.data.transforms.Transform`."""
        chosen = (draws.uniform() < self._p).view(-1, 1, 1, 1)
        flipped = {}
        for name in self._fields:
            image = image_of(batch, name)
            here = _sent(chosen, image.device)
            flipped[name] = torch.where(here, image.flip(self._axis), image)
        return batch | flipped


def _sent(choices: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return choices of the CPU on the device of the batch; the host does not wait for a GPU."""
    if device.type == "cuda":
        choices = choices.pin_memory()
    return choices.to(device, non_blocking=True)
