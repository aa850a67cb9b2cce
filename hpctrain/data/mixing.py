"""Mixup and CutMix: a batch transform that mixes each image and its label with those of another.

    mixup    image = share x image + (1 - share) x other
    cutmix   a rectangle of the other image replaces that part of the image
    label    share of the own class, and 1 - share of the other class

Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization"; Yun et al. 2019, "CutMix:
Regularization Strategy to Train Strong Classifiers with Localizable Features". `share` is drawn
from a Beta distribution for each image.
"""

import numpy as np
import torch
import torch.nn.functional as F

from hpctrain.base.errors import ConfigError
from hpctrain.data.batch_fields import field_of, image_of
from hpctrain.data.draws import Draws
from hpctrain.data.shards.types import Batch


class Mix:
    """Mixes each image with the one at the mirrored place in the batch of its rank.

    What is drawn for an image depends on the seed, the epoch and its position, so a resumed run
    draws the same. The other image depends on the number of ranks. A row that only fills up the
    batch is not mixed into others. The labels become probabilities, float32 (batch, classes), which
    `hpctrain.tasks.Classification` takes; an evaluation leaves this transform out.

    Args:
        classes: Number of classes.
        mixup: Both parameters of the Beta distribution of mixup; 0 leaves mixup out.
        cutmix: The same of CutMix. Where both are used, each has every second image on average.
        image: Field of the images, any numeric dtype, shape (batch, channels, height, width).
        label: Field of the classes, an integer dtype, shape (batch,).

    Raises:
        ConfigError: A number is out of its range.
    """

    random = True

    def __init__(
        self,
        classes: int,
        mixup: float = 0.2,
        cutmix: float = 1.0,
        image: str = "image",
        label: str = "label",
    ) -> None:
        if classes < 2 or min(mixup, cutmix) < 0 or not max(mixup, cutmix) > 0:
            raise ConfigError(
                f"Mix classes={classes}, mixup={mixup}, cutmix={cutmix}: 2 classes or more, and "
                "numbers from 0, of which one is above 0"
            )
        self._classes, self._mixup, self._cutmix = classes, mixup, cutmix
        self._image, self._label = image, label
        # The part of the images for which CutMix is used.
        self._part = 0.5 if mixup and cutmix else float(cutmix > 0)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """See `hpctrain.data.transforms.Transform`."""
        images, labels = image_of(batch, self._image), field_of(batch, self._label)
        if labels.shape != images.shape[:1] or labels.is_floating_point():
            raise ConfigError(
                f"Mix wants one class for each image; {self._image!r} is {[*images.shape]}, "
                f"{self._label!r} is {[*labels.shape]}"
            )
        height, width = images.shape[2:]
        cut = draws.uniform() < self._part
        share = self._shares(cut, draws.integers(2**31))
        inside, covered = _rectangles(height, width, share, draws.uniform(), draws.uniform())
        share = torch.where(cut, 1 - covered, share)
        weight = torch.where(cut.view(-1, 1, 1), ~inside, share.view(-1, 1, 1).expand_as(inside))
        device, dtype = images.device, torch.get_default_dtype()
        mixed_with = batch["mask"].flip(0) if "mask" in batch else labels.new_ones(len(labels))
        alone = ~mixed_with.bool()
        share = torch.where(alone, 1.0, share.to(device))
        weight = torch.where(alone.view(-1, 1, 1), 1.0, weight.to(device, dtype)).unsqueeze(1)
        own = images.to(dtype)
        hot = F.one_hot(labels.long(), self._classes).to(dtype)
        mixed = own * weight + own.flip(0) * (1 - weight)
        classes = hot * share[:, None] + hot.flip(0) * (1 - share[:, None])
        return batch | {self._image: mixed, self._label: classes}

    def _shares(self, cut: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """Return the share of each image itself, float32 (batch,)."""
        parameters = [self._cutmix if one else self._mixup for one in cut.tolist()]
        drawn = [
            np.random.default_rng(seed).beta(alpha, alpha)
            for seed, alpha in zip(seeds.tolist(), parameters, strict=True)
        ]
        return torch.tensor(drawn, dtype=torch.float32)


def _rectangles(
    height: int, width: int, share: torch.Tensor, y: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rectangles that are replaced, bool (batch, height, width), and what they cover.

    `share` (batch,) is the part of each image that stays if its rectangle is whole; `y` and `x`
    (batch,) are the centres, 0 to 1.
    """
    side = (1 - share).sqrt()

    def within(size: int, centre: torch.Tensor) -> torch.Tensor:
        places = torch.arange(size)[None]
        middle, half = (centre * size).floor()[:, None], (side * size / 2).floor()[:, None]
        return (places >= middle - half) & (places < middle + half)

    inside = within(height, y)[:, :, None] & within(width, x)[:, None, :]
    return inside, inside.float().mean((1, 2))
