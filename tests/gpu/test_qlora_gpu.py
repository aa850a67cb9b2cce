"""Layers in 4 bits train on a GPU as layers with the rounded weights do."""

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.device import DEVICE, on_device
from tests.parallel.test_qlora import WHY, pair

pytestmark = on_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_as_beside_the_rounded_weights(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes", reason=WHY)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(32, 64, generator=draw).to(DEVICE, dtype)
    labels = torch.randint(0, 10, (32,), generator=draw).to(DEVICE)
    found = []
    for model in pair(dtype):
        trained = [p for p in model.to(DEVICE).parameters() if p.requires_grad]
        optimizer, losses = torch.optim.SGD(trained, lr=0.02), []
        for _ in range(10):
            loss = F.cross_entropy(model(x).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1][-1] < 0.9 * found[1][0], "it must learn"
    assert found[0] == pytest.approx(found[1], rel=1e-3 if dtype is torch.float32 else 5e-2)
