"""Tests of the convolutional network, and of a torchvision model given by its `_target_`."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from torch import nn

from hpctrain.models import ConvNet
from tests.conftest import ROOT


def conf(name: str) -> dict[str, object]:
    found: dict[str, object] = yaml.safe_load(Path(ROOT, f"conf/model/{name}.yaml").read_text())
    return found


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_shapes(norm: str) -> None:
    model = ConvNet(3, [8, 16, 32], 5, norm=norm)
    assert model(torch.randn(2, 3, 33, 17)).shape == (2, 5)
    sizes = [
        block(torch.randn(2, ins, 9, 8)).shape[2:]
        for block, ins in zip(model.blocks, (3, 8, 16), strict=True)
    ]
    assert sizes == [(9, 8), (5, 4), (5, 4)]
    norms = [m for m in model.modules() if isinstance(m, (nn.GroupNorm, nn.BatchNorm2d))]
    assert len(norms) == 6


def test_samples_do_not_mix() -> None:
    torch.manual_seed(0)
    model, images = ConvNet(3, [8, 16], 5), torch.randn(4, 3, 8, 8)
    assert torch.allclose(model(images)[1:2], model(images[1:2]), atol=1e-6)


@pytest.mark.parametrize(
    ("widths", "norm", "said"),
    [
        ([], "group", "widths=[]"),
        ([12], "group", "12 is not a multiple of 8"),
        ([8], "layer", "norm=layer: it is group or batch"),
    ],
)
def test_what_does_not_fit(widths: list[int], norm: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ConvNet(3, widths, 5, norm=norm)


def test_resnet_of_torchvision() -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # a build for CUDA fails with torch for the CPU
        pytest.skip(f"torchvision cannot be imported: {error}")
    model = instantiate(conf("resnet18"))
    assert sum(p.numel() for p in model.parameters()) == 11_689_512
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 1000)
