"""fp32 is fp32 everywhere on a GPU, and tf32 is not."""

import pytest
import torch
import torch.nn.functional as F

from hpctrain.config.schema import PrecisionConfig
from hpctrain.engine.parallel.precision import Precision
from tests.gpu.device import CUDA, on_gpu_with

pytestmark = on_gpu_with("tf32")


@pytest.mark.parametrize(
    ("compute", "least", "most"), [("fp32", 0, 1e-5), ("tf32", 1e-5, 1e-2)], ids=["fp32", "tf32"]
)
def test_products_and_convolutions(compute: str, least: float, most: float) -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(8, 64, 16, 16, generator=draw)
    weights = torch.randn(64, 64, 3, 3, generator=draw)
    exact = F.conv2d(images.double(), weights.double())
    left, right = torch.randn(2, 256, 256, generator=draw)
    try:
        Precision(PrecisionConfig(compute=compute), CUDA)
        found = F.conv2d(images.to(CUDA), weights.to(CUDA)).to("cpu").double()
        product = (left.to(CUDA) @ right.to(CUDA)).to("cpu").double()
    finally:
        Precision(PrecisionConfig(), CUDA)
    assert least < (found - exact).norm() / exact.norm() < most
    whole = left.double() @ right.double()
    assert least < (product - whole).norm() / whole.norm() < most
