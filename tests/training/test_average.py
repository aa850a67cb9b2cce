"""A step converts few parameters in half precision at a time, and their average is the same."""

from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.training import average
from hpctrain.training.average import Average
from tests.steps import Watched, alone

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_half_precision(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(average, "_PART", 1000)
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
    converted = [0]  # elements before each call of a kernel that averages
    cut: list[int] = []  # elements of tensors that are cut into pieces

    def see(op: Any, out: Any) -> None:
        if op is torch.ops.aten._to_copy.default:
            converted[-1] += out.numel()
        elif op is torch.ops.aten._foreach_lerp_.Scalar:
            converted.append(0)
        elif op is torch.ops.aten.split.Tensor:
            cut.append(sum(piece.numel() for piece in out))

    for _ in range(3):
        with torch.no_grad():
            for name, parameter in module.items():
                parameter.add_(torch.randn(parameter.shape, generator=draw))
                expected[name].lerp_(parameter.float(), 1 - decay)
        with Watched(see):
            kept.update()
    assert all(torch.equal(kept.tensors[name], expected[name]) for name in module)
    assert 500 < max(converted) <= 1000
    assert sorted(cut) == [1600] * 6 + [2500] * 6 + [3600] * 6, "no small one: it takes time"
