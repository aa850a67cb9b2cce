"""Matrix products in 8 bits on a GPU: initial values, losses, and batches of any size."""

import functools

import pytest
import torch

from hpctrain.config.schema import Config, FSDPConfig, ParallelConfig
from hpctrain.models import Transformer
from hpctrain.tasks import LanguageModel
from tests.gpu.device import CUDA, cuda_group, on_gpu_with, tokens  # noqa: F401  a fixture
from tests.parallel.parity import spread, whole
from tests.steps import step_of

pytestmark = [*on_gpu_with("fp8"), pytest.mark.usefixtures("torchao", "cuda_group")]
MODEL = functools.partial(Transformer, 512, 256, 4, 8, 4, norm="layer", mlp="gelu", bias=True)
# With offload FSDP2 holds the parameters, as with several ranks.
SHARDED = ParallelConfig(dp_replicate=1, fsdp=FSDPConfig(offload=True))


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is needed")


def train(
    compute: str, parallel: ParallelConfig, *, rows: int = 8, length: int = 128
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the initial parameters, and the losses of 20 steps on one batch."""
    config = Config(parallel=parallel)
    config.precision.compute = compute
    model = spread(MODEL, config, CUDA)
    kinds = {name: type(m).__name__ for name, m in model.module.named_modules()}
    assert (kinds["layers.0.mlp.up"] == "Float8Linear") == (compute == "fp8")
    assert kinds["head"] == "Linear"
    initial = {name: value.clone() for name, value in whole(model).items()}
    optimizer = torch.optim.AdamW(model.parameters, lr=1e-3)
    step = step_of(model, LanguageModel(), optimizer, clip_norm=1.0)
    batch, losses = tokens(rows, length, 512), []
    for _ in range(20):
        step(batch, 1e-3)
        losses.append(step.totals.means()["loss"])
    return initial, losses


@pytest.mark.parametrize("parallel", [ParallelConfig(), SHARDED], ids=["whole", "sharded"])
def test_initial_values_and_losses_are_near_bf16(parallel: ParallelConfig) -> None:
    (theirs, expected), (ours, losses) = train("bf16", parallel), train("fp8", parallel)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert losses == pytest.approx(expected, rel=5e-2)
    assert losses[-1] < losses[0] - 0.5, "it must learn"


@pytest.mark.parametrize(("rows", "length"), [(1, 16), (3, 43), (7, 1)])
def test_any_number_of_tokens(rows: int, length: int) -> None:
    """The last batch of an evaluation or of an epoch has any size."""
    expected = train("bf16", ParallelConfig(), rows=rows, length=length)[1]
    losses = train("fp8", ParallelConfig(), rows=rows, length=length)[1]
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-1)
