"""The predicted peaks of memory are within 10% of those that a training on the CPU measures."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.faults.stop import Stop
from hpctrain.models import ConvNet, Transformer
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.plan.inspecting.activations import activations_of
from hpctrain.plan.inspecting.model_facts import facts_of
from hpctrain.plan.layouts import Layout
from hpctrain.plan.predicting.rank_memory import MemoryModel
from hpctrain.shards.types import Batch
from hpctrain.tasks import Classification, LanguageModel
from hpctrain.training.step import TrainStep
from tests.parallel.live import Live

CPU = torch.device("cpu")


class Own(nn.Module):
    """A model of a user, without a plan or a method of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 1024, "n_positions": 256}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, **ends))


def tokens(rows: int) -> Batch:
    return {"tokens": torch.randint(0, 1024, (rows, 257)), "mask": torch.ones(rows).bool()}


def images(rows: int) -> Batch:
    labels = torch.randint(0, 10, (rows,))
    return {"image": torch.rand(rows, 3, 32, 32), "label": labels, "mask": torch.ones(rows).bool()}


small = partial(Transformer, vocab_size=1024, dim=128, layers=8, heads=4)
conv = partial(ConvNet, in_channels=3, widths=[32, 64, 64], out_features=10)
LM, IMAGES = LanguageModel(), Classification()
CASES: list[tuple[Callable[[], Any], Any, Batch, str, int, str]] = [
    *[(small, LM, tokens(4), mode, 1, "fp32") for mode in ("none", "selective", "full")],
    (small, LM, tokens(8), "none", 2, "fp32"),
    *[(small, LM, tokens(4), mode, 1, "bf16") for mode in ("none", "full")],
    *[(conv, IMAGES, images(32), mode, 1, "fp32") for mode in ("none", "full")],
    *[(gpt2, LM, tokens(4), mode, 1, "fp32") for mode in ("none", "full")],
    *[(Own, IMAGES, images(2048), mode, 1, "fp32") for mode in ("none", "full")],
]


@pytest.fixture
def group() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "case",
    [pytest.param(i, marks=[pytest.mark.slow] * (i != 1)) for i in range(len(CASES))],
)
def test_peak_memory(case: int) -> None:
    build, task, batch, mode, parts, compute = CASES[case]
    config = Config(model={"_target_": "any"})
    config.train.activation_checkpointing, config.train.accumulate = mode, parts
    config.train.global_batch_size = len(batch["mask"])
    config.optimizer.options = {"fused": True}  # a CPU makes no copy of all parameters
    config.precision.compute = compute
    sample = {name: tensor[:1].to("meta") for name, tensor in batch.items()}
    with torch.device("meta"):
        model = build()
    dtype = torch.bfloat16 if compute == "bf16" else None
    activations = {mode: activations_of(build, task, sample, dtype, config.train)}
    memory = MemoryModel(model, facts_of(model, task, sample), activations)
    predicted = memory.of(Layout(config, 1, ()), None)
    with Live() as live:
        mesh = Mesh(Degrees(), 0, CPU)
        parallel = parallelize(build, config, mesh, Precision(config.precision, CPU))
        optimizer = torch.optim.AdamW(parallel.parameters)
        step = TrainStep(parallel, task, optimizer, clip_norm=1.0, stop=Stop())
        step(batch, 0.1)
        live.restart()
        step(batch, 0.1)
    held = sum(t.nbytes for t in batch.values())
    assert predicted.allowance == 0
    assert predicted.total + held == pytest.approx(live.peak, rel=0.1)
