"""Initial values are those of a CPU, offloaded models train, and trainings can be repeated."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.schema import Config, FSDPConfig, ParallelConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.supervised.deterministic import deterministic
from hpctrain.models import ConvNet, Transformer
from hpctrain.tasks import Classification, LanguageModel
from tests.gpu.device import CUDA, cuda_group, on_gpu  # noqa: F401  a fixture
from tests.parallel.parity import initialised, spread, whole
from tests.steps import step_of

pytestmark = [*on_gpu, pytest.mark.usefixtures("workspace", "cuda_group")]
OFFLOAD = ParallelConfig(dp_replicate=1, fsdp=FSDPConfig(offload=True))


class Own(nn.Module):
    """A user's model, which rank 0 builds, with a batch norm and a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.BatchNorm1d(64)
        self.factor = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.rand(64), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.flatten(1)
        for layer in self.layers:
            x = x + layer(x).relu()
        out: torch.Tensor = self.norm(x + self.shift) * self.factor
        return out


MODELS: dict[str, Any] = {
    "experts": functools.partial(Transformer, 64, 64, 2, 4, 2, experts=4, shared_experts=1),
    "batch norm": functools.partial(ConvNet, 1, [16, 32], 10, "batch"),
    "own": Own,
}


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the deterministic training


def batch(name: str) -> Batch:
    draw = torch.Generator().manual_seed(0)
    made = {
        "tokens": torch.randint(0, 64, (16, 33), generator=draw),
        "tokens_document": (torch.rand((16, 33), generator=draw) < 0.1).int().cumsum(1),
    }
    if name != "experts":
        made = {
            "image": torch.randint(0, 16, (16, 1, 8, 8), generator=draw, dtype=torch.uint8),
            "label": torch.randint(0, 10, (16,), generator=draw),
        }
    made["mask"] = torch.ones(16, dtype=torch.bool)
    return {key: value.to(CUDA) for key, value in made.items()}


def train(
    name: str, parallel: ParallelConfig, steps: int = 5
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses, and the parameters and buffers at the end."""
    model = spread(MODELS[name], Config(parallel=parallel), CUDA)
    for key, buffer in model.module.named_buffers():
        assert buffer.device == CUDA, key
    optimizer = torch.optim.SGD(model.parameters, momentum=0.9)
    task = LanguageModel(documents=True) if name == "experts" else Classification(scale=1 / 16)
    step = step_of(model, task, optimizer, clip_norm=0.2)
    losses = []
    for _ in range(steps):
        step(batch(name), 0.1)
        losses.append(step.totals.means()["loss"])
    values = whole(model) | {key: value.clone() for key, value in model.module.named_buffers()}
    return losses, {key: value.to("cpu") for key, value in values.items()}


@pytest.mark.parametrize("name", MODELS)
def test_offload_trains_as_without_it(name: str) -> None:
    (expected, theirs), (losses, ours) = train(name, ParallelConfig()), train(name, OFFLOAD)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.allclose(value, theirs[key], rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_are_those_of_a_cpu(name: str) -> None:
    cpu = initialised(MODELS[name], 0, torch.float32, torch.device("cpu")).state_dict()
    gpu = initialised(MODELS[name], 0, torch.float32, CUDA).state_dict()
    assert cpu.keys() == gpu.keys()
    for key, value in gpu.items():
        assert torch.equal(value.to("cpu"), cpu[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_a_deterministic_training_can_be_repeated_bit_by_bit(name: str) -> None:
    with deterministic(CUDA):
        (first, one), (second, two) = (train(name, ParallelConfig(), 10) for _ in range(2))
    assert first == second
    for key, value in one.items():
        assert torch.equal(value, two[key]), key
