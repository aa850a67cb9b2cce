"""Matrix products in 8 bits: which layers have them, and from which values they start.

A CPU computes them with torchao's own code, but without the GPU's demands on sizes, which a test
makes in place of it. tests/gpu/test_float8_gpu.py trains on a GPU.
"""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.engine.parallel import precision
from hpctrain.engine.parallel.precision import compute_in_float8, float8_layers
from hpctrain.errors import ConfigError
from hpctrain.models import MLP, ConvNet, Transformer
from tests.parallel.parity import spread, whole
from tests.ranks import run_ranks

MODEL = functools.partial(Transformer, 64, 32, 2, 2, norm="layer", mlp="gelu", bias=True)


def test_the_head_and_odd_sizes_stay_in_high_precision() -> None:
    names = ("attention.query", "attention.key", "attention.value", "attention.out")
    inside = [f"layers.{i}.{name}" for i in (0, 1) for name in (*names, "mlp.up", "mlp.down")]
    assert float8_layers(MODEL(), []) == inside
    assert float8_layers(MODEL(hidden=40), []) == [n for n in inside if "mlp" not in n]
    assert float8_layers(MLP(64, [32, 24, 32], 16), []) == ["1"], "it has no blocks but its layers"
    odd = functools.partial(float8_layers, MODEL(), ["Nothing"])
    with pytest.raises(ConfigError, match="no module of class Nothing"):
        odd()
    with pytest.raises(ConfigError, match=r"compute=fp8: ConvNet has no linear .* 1 in all, 0 of"):
        float8_layers(ConvNet(1, [16, 16], 16), [])


def initials() -> list[dict[str, torch.Tensor]]:
    """Return the initial parameters without and with fp8; its GPU is only claimed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "lack", lambda *_: "")
        return [initial("bf16"), initial("fp8")]


def initial(compute: str) -> dict[str, torch.Tensor]:
    config = Config(parallel=ParallelConfig(dp_replicate=1, dp_shard=2))
    config.precision.compute = compute
    model = spread(MODEL, config)
    converted = [n for n, m in model.module.named_modules() if type(m).__name__ == "Float8Linear"]
    assert len(converted) == (12 if compute == "fp8" else 0)
    return whole(model)


@pytest.mark.slow  # torchao takes seconds to import, on each rank
def test_initial_values_are_those_of_the_model() -> None:
    pytest.importorskip("torchao", reason="torchao is for make test-all")
    for expected, values in run_ranks(initials, 2):
        assert 0.019 < expected["layers.0.attention.query.weight"].std() < 0.021
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name


def test_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="torchao is for make test-all")
    product, sizes = torch._scaled_mm, []

    def as_on_a_gpu(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        """cuBLAS wants both sizes of the second matrix to be multiples of 16."""
        assert not b.shape[0] % 16, f"{tuple(a.shape)} times {tuple(b.shape)}"
        assert not b.shape[1] % 16, f"{tuple(a.shape)} times {tuple(b.shape)}"
        sizes.append(b.shape[0])
        return product(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", as_on_a_gpu)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16()
    converted = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16()
    converted.load_state_dict(plain.state_dict())
    compute_in_float8(converted, ["0"])
    x = torch.randn(3, 7, 32, dtype=torch.bfloat16)
    gradients = []
    for model in (plain, converted):
        model(x).square().sum().backward()
        gradients.append(model[0].weight.grad.float())
    assert sizes == [32, 48, 32], "output, gradient of the input, and of the weight with 21 rows"
    assert 0 < (gradients[1] - gradients[0]).norm() / gradients[0].norm() < 0.1
