"""Measures the peak of a step's memory, and predicts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.config.sections import LoopSections
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.parts import training_of
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.preparing.whole_model import freeze, with_adapters
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.insight.estimates.hardware import of_section
from hpctrain.insight.plan.inspecting.activations import MeasuredActivations
from hpctrain.insight.plan.inspecting.model_facts import facts_of
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.predicting.rank_memory import MemoryModel, RankMemory
from hpctrain.models import ConvNet, Transformer
from hpctrain.tasks import Classification, LanguageModel, on_part
from tests.parallel.live import Live
from tests.steps import step_of

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


def _tokens(rows: int) -> Batch:
    return {"tokens": torch.randint(0, 1024, (rows, 257)), "mask": torch.ones(rows).bool()}


def _images(rows: int) -> Batch:
    labels = torch.randint(0, 10, (rows,))
    return {"image": torch.rand(rows, 3, 32, 32), "label": labels, "mask": torch.ones(rows).bool()}


_small = partial(Transformer, vocab_size=1024, dim=128, layers=8, heads=4)
# Each kind of model: how it is built, its task, and a batch of some rows.
KINDS: dict[str, tuple[Callable[[], Any], Any, Callable[[int], Batch]]] = {
    "Transformer": (_small, LanguageModel(), _tokens),
    "experts": (partial(_small, layers=4, experts=4), LanguageModel(), _tokens),
    "ConvNet": (
        partial(ConvNet, in_channels=3, widths=[32, 64, 64], out_features=10),
        *(Classification(), _images),
    ),
    "GPT-2 of transformers": (gpt2, LanguageModel(), _tokens),
    "a user's model": (Own, Classification(), _images),
}


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        kind: A name in `KINDS`.
        rows: The rows of a rank's share of the batch.
        mode: `train.activation_checkpointing`.
        keys: Other keys of the config.
        ranks: The ranks.
        compute: `precision.compute`.
    """

    kind: str
    rows: int
    mode: str = "none"
    keys: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    compute: str = "fp32"

    @property
    def config(self) -> Config:
        """The config of the case."""
        config = Config(model={"_target_": "any"})
        config.parallel.device = "cpu"
        config.train.activation_checkpointing = self.mode
        config.optimizer.options = {"fused": True}  # a CPU makes no copy of all parameters
        config.precision.compute = self.compute
        config.launch.tasks_per_node = self.ranks
        for key, value in self.keys.items():
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(config), name, value)
        degrees = Degrees.of(config.parallel, self.ranks)
        config.train.global_batch_size = self.rows * degrees.dp
        return config


def predicted(case: Case) -> RankMemory:
    """Return the prediction."""
    plain, task, batch_of = KINDS[case.kind]
    build = partial(_adapted, plain, case.config)
    sample = {name: tensor[:1].to("meta") for name, tensor in batch_of(1).items()}
    config = case.config
    with torch.device("meta"):
        model = build()
    dtype = torch.bfloat16 if case.compute == "bf16" else None
    activations = MeasuredActivations(build, task, sample, dtype)
    memory = MemoryModel(model, facts_of(model, task, sample), activations)
    return memory.of(Layout(config, 1, ()), of_section({}))


def _adapted(build: Callable[[], Any], config: Config) -> nn.Module:
    model = with_adapters(build(), config.train.lora)
    freeze(model, config.optimizer, config.parallel.blocks, config.train.lora)
    return model


def measured(case: Case) -> int:
    """Return the bytes at the peak of this rank's second step, without the batch; collective."""
    build, task, batch_of = KINDS[case.kind]
    config, batch = case.config, batch_of(case.rows)
    degrees = Degrees.of(config.parallel, distributed.get_world_size())
    torch.manual_seed(0)
    with Live() as live:
        mesh = Mesh(degrees, distributed.get_rank(), CPU)
        parallel = parallelize(
            *(build, config.parallel, mesh, Precision(config.precision, CPU)),
            training_of(LoopSections.of(config), mesh, getattr(task, "loss_parallel", False)),
        )
        optimizer = torch.optim.AdamW(parallel.parameters)
        part = on_part(task, mesh.sequence_part)
        step = step_of(parallel, part, optimizer, clip_norm=1.0)
        step(batch, 0.1)
        live.restart()
        step(batch, 0.1)
    return live.peak - sum(t.nbytes for t in batch.values())
