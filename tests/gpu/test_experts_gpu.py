"""The grouped matrix products of a GPU give the results of one expert after the other."""

import pytest
import torch

from hpctrain.models.experts import grouped, one_by_one
from tests.gpu.device import on_gpu

pytestmark = on_gpu


@pytest.mark.parametrize("counts", [[64, 64, 64, 64], [3, 0, 250, 3], [0, 0, 0, 1]], ids=str)
def test_grouped_products_equal_the_loop(counts: list[int]) -> None:
    results = []
    for compute in (one_by_one, grouped):
        draw = torch.Generator("cuda").manual_seed(0)
        x, *weights = (
            (torch.randn(shape, generator=draw, device="cuda") / 8).bfloat16().requires_grad_()
            for shape in ((sum(counts), 64), *[(4, 96, 64)] * 3)
        )
        out = compute(x, torch.tensor(counts, device="cuda"), *weights)
        target = torch.randn(out.shape, generator=draw, device="cuda").bfloat16()
        results.append([out, *torch.autograd.grad((out * target).sum(), [x, *weights])])
    for one, other in zip(*results, strict=True):
        scale = float(one.abs().max())
        assert scale > 0
        assert float((one - other).abs().max()) < 0.02 * scale
