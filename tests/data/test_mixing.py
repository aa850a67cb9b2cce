"""Mixup and CutMix: what is mixed, that it is drawn from the position, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data.draws import Draws
from hpctrain.data.mixing import Mix
from hpctrain.data.transforms import CenterCrop
from hpctrain.errors import ConfigError
from hpctrain.tasks import Classification

CLASSES, ROWS = 5, 64


def batch() -> dict[str, torch.Tensor]:
    """Images whose pixels all have the number of the row, of the class row % 5."""
    rows = torch.arange(ROWS)
    images = rows.view(-1, 1, 1, 1).expand(-1, 3, 12, 10).to(torch.uint8)
    return {"image": images, "label": rows % CLASSES, "mask": rows < ROWS - 2}


def mixed(epoch: int = 3, rows: slice = slice(None), **arguments: Any) -> dict[str, torch.Tensor]:
    draws = Draws(1, epoch, np.arange(100, 100 + ROWS)[rows])
    return Mix(CLASSES, **arguments)({name: v[rows] for name, v in batch().items()}, draws)


@pytest.mark.parametrize("how", [{"cutmix": 0.0}, {"mixup": 0.0}, {}])
def test_the_label_has_the_share_of_the_image(how: dict[str, float]) -> None:
    found = mixed(**how)
    rows = torch.arange(ROWS)
    other = rows.flip(0)
    own_share = (found["image"].mean((1, 2, 3)) - other) / (rows - other)
    labels = torch.zeros(ROWS, CLASSES)
    labels[rows, rows % CLASSES] += own_share
    labels[rows, other % CLASSES] += 1 - own_share
    assert torch.allclose(found["label"], labels, atol=1e-4)
    assert torch.allclose(found["label"].sum(1), torch.ones(ROWS))
    assert -1e-4 < float(own_share[5:-5].min()) < 0.5
    assert (found["image"][:2] == torch.arange(2).view(-1, 1, 1, 1)).all()  # not with padding
    if how.get("mixup") == 0.0:  # CutMix leaves each pixel to one of the two
        pixels = found["image"] - rows.view(-1, 1, 1, 1)
        assert ((pixels == 0) | (pixels == (other - rows).view(-1, 1, 1, 1))).all()


def test_a_resumed_run_draws_the_same_and_another_epoch_does_not() -> None:
    first, again, later = mixed(), mixed(), mixed(epoch=4)
    assert torch.equal(first["image"], again["image"])
    assert not torch.equal(first["image"], later["image"])
    # The shares depend on the position of an image only, and not on the ranks that divide a batch.
    shares = Mix(CLASSES)._shares
    whole, half = (Draws(1, 3, np.arange(100, 100 + n)).integers(2**31) for n in (8, 4))
    cut = torch.zeros(8, dtype=torch.bool)
    assert torch.equal(shares(cut, whole)[:4], shares(cut[:4], half))


def test_classification_takes_what_is_mixed() -> None:
    found = mixed()
    logits = torch.randn(ROWS, CLASSES)
    total, count = Classification(top_k=[2], label_smoothing=0.1).sums(logits, found)["loss"]
    assert count == ROWS - 2
    assert total.isfinite()


def test_what_does_not_fit() -> None:
    for arguments in (
        {"classes": 1},
        {"classes": 3, "mixup": -1},
        {"classes": 3, "mixup": 0, "cutmix": 0},
    ):
        with pytest.raises(ConfigError, match="2 classes or more"):
            Mix(**arguments)
    with pytest.raises(ConfigError, match=r"wants field 'image'; the batch has x"):
        Mix(3)({"x": torch.zeros(2)}, Draws(0, 0, np.arange(2)))
    with pytest.raises(ConfigError, match=r"'label' is \[2, 3\]"):
        Mix(3)(
            {"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2, 3)},
            Draws(0, 0, np.arange(2)),
        )


def test_the_middle_of_an_image() -> None:
    image = torch.arange(20.0).view(1, 1, 4, 5)
    draws = Draws(0, 0, np.arange(1))
    assert CenterCrop(2)({"image": image}, draws)["image"].flatten().tolist() == [6, 7, 11, 12]
    with pytest.raises(ConfigError, match="'image' is 4 x 5; the crop is 1 or more"):
        CenterCrop(5)({"image": image}, draws)
