"""A step converts one parameter in half precision at a time, and the averages are right."""

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.addons.average import Average
from tests.steps import Watched, alone

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_half_precision(decay: float) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "small": (7, 9), "rows": (90, 40), "long": (2500,), "none": (0, 4)}
    made = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    module = nn.ParameterDict({name: nn.Parameter(x.bfloat16()) for name, x in made.items()})
    module["whole"] = nn.Parameter(torch.randn(70, 50, generator=draw))
    module["image"] = nn.Parameter(
        torch.randn(8, 8, 5, 5, generator=draw).bfloat16().to(memory_format=torch.channels_last)
    )
    kept = Average(alone(module), decay)
    expected = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    copied: list[int] = []  # elements

    def see(op: Any, out: Any) -> None:
        if op is torch.ops.aten._to_copy.default:
            copied.append(out.numel())

    for _ in range(3):
        with torch.no_grad():
            for name, parameter in module.items():
                parameter.add_(torch.randn(parameter.shape, generator=draw))
                expected[name].lerp_(parameter.float(), 1 - decay)
        with Watched(see):
            kept.after_update()
    assert all(torch.equal(kept.tensors[name], expected[name]) for name in module)
    assert max(copied) == 3600, "not all at a time"
