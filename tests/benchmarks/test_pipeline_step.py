"""Compares a step of a pipeline with a torch.distributed.pipelining loop by hand, on 4 gloo ranks.

python -m pytest tests/benchmarks/test_pipeline_step.py --benchmark-only -s
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hpctrain.config.degrees import Degrees
from hpctrain.config.pipeline import bubble
from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.faults.stop import Stop
from hpctrain.models import Transformer
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.tasks import LanguageModel
from hpctrain.train.step import TrainStep
from tests.ranks import run_ranks

RANKS, PARTS, ROUNDS, VOCABULARY = 4, 8, 20, 256


def model() -> Transformer:
    return Transformer(VOCABULARY, 128, 4, 4)


class Part(nn.Module):
    """One layer of the model, as a stage that is written by hand."""

    def __init__(self, whole: Transformer, number: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == RANKS - 1
        self.embed = whole.embed if self.first else None
        self.layer = whole.layers[number]
        self.norm, self.head = (whole.norm, whole.head) if self.last else (None, None)
        self.rotation = rotation(whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        x = self.layer(x, self.rotation, None)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def rotation(whole: Transformer) -> tuple[torch.Tensor, torch.Tensor]:
    from hpctrain.models.transformer import rotary

    return rotary(torch.arange(128)[None], whole.head_dim, whole.theta)


def by_hand() -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a training step, with the same clipping of the global norm."""
    rank, cpu = distributed.get_rank(), torch.device("cpu")
    part = Part(model(), rank)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    schedule = Schedule1F1B(PipelineStage(part, rank, RANKS, cpu), PARTS, loss_fn=loss_of)

    def step(batch: dict[str, torch.Tensor]) -> None:
        tokens = batch["tokens"]
        losses: list[torch.Tensor] = []
        arguments = (tokens[:, :-1],) if rank == 0 else ()
        target = tokens[:, 1:] if rank == RANKS - 1 else None
        schedule.step(*arguments, target=target, losses=losses, return_outputs=False)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        distributed.all_reduce(mean)  # the loss that is logged
        gradients = [p.grad for p in part.parameters() if p.grad is not None]
        squares = torch.nn.utils.get_total_norm(gradients) ** 2
        distributed.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours() -> tuple[Callable[[dict[str, torch.Tensor]], object], TrainStep]:
    cpu = torch.device("cpu")
    config = Config(parallel=ParallelConfig(dp_replicate=1, pp=RANKS))
    config.train.accumulate = PARTS
    config.parallel.pipeline.blocks = [1] * RANKS
    mesh = Mesh(Degrees.of(config.parallel, RANKS), distributed.get_rank(), cpu)
    made = parallelize(model, config, mesh, Precision(config.precision, cpu))
    adam = torch.optim.AdamW(made.parameters)
    step = TrainStep(made, LanguageModel(), adam, clip_norm=1.0, stop=Stop())
    return lambda batch: step(batch, 1e-3), step


def measure() -> dict[str, float]:
    """Return the median seconds of a step by name, and the bubble; the functions take turns."""
    torch.set_num_threads(1)
    step, train_step = ours()
    made = {"by hand": by_hand(), "ours": step}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    bubbles = []
    for number in range(ROUNDS + 3):
        draw = torch.Generator().manual_seed(number)
        batch = {
            "tokens": torch.randint(0, VOCABULARY, (2 * PARTS, 129), generator=draw),
            "mask": torch.ones(2 * PARTS, dtype=torch.bool),
        }
        for name, function in made.items():
            distributed.barrier()
            began = time.perf_counter()
            function(batch)
            distributed.barrier()
            seconds[name].append(time.perf_counter() - began)
        bubbles.append(train_step.totals.means()["bubble"])
    medians = {name: statistics.median(values[3:]) for name, values in seconds.items()}
    return medians | {"bubble": statistics.median(bubbles[3:])}


def test_steps(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmark.pedantic(lambda: run_ranks(measure, RANKS, timeout=300)[0], rounds=1)
    ratio, expected = found["ours"] / found["by hand"], bubble("1f1b", RANKS, PARTS)
    with capsys.disabled():
        print(f"\n1f1b, {RANKS} ranks, {PARTS} micro-batches: ", end="")
        print(
            f"by hand {1e3 * found['by hand']:.1f} ms, ours {1e3 * found['ours']:.1f} ms, ", end=""
        )
        print(f"{ratio:.2f} x; bubble {found['bubble']:.3f}, expected {expected:.3f}")
    assert ratio > 0
