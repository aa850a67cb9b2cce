"""Compares a step of a pipeline with a torch.distributed.pipelining loop by hand, on gloo ranks.

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
from hpctrain.models.transformer import rotary
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.tasks import LanguageModel
from hpctrain.train.step import TrainStep
from tests.ranks import run_ranks

LAYERS, PARTS, ROUNDS, VOCABULARY = 4, 8, 20, 256


def model() -> Transformer:
    return Transformer(VOCABULARY, 128, LAYERS, 4)


class Part(nn.Module):
    """The layers of one stage, written by hand."""

    def __init__(self, whole: Transformer, number: int, count: int) -> None:
        super().__init__()
        size = LAYERS // count
        self.embed = whole.embed if number == 0 else None
        self.layers = whole.layers[number * size : (number + 1) * size]
        self.norm, self.head = (whole.norm, whole.head) if number == count - 1 else (None, None)
        self.rotation = rotary(torch.arange(128)[None], whole.head_dim, whole.theta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x, self.rotation, None)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def by_hand() -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a training step, with the same clipping of the global norm."""
    rank, count, cpu = distributed.get_rank(), distributed.get_world_size(), torch.device("cpu")
    part = Part(model(), rank, count)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    schedule = Schedule1F1B(PipelineStage(part, rank, count, cpu), PARTS, loss_fn=loss_of)

    def step(batch: dict[str, torch.Tensor]) -> None:
        tokens = batch["tokens"]
        losses: list[torch.Tensor] = []
        arguments = (tokens[:, :-1],) if rank == 0 else ()
        target = tokens[:, 1:] if rank == count - 1 else None
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
    count, cpu = distributed.get_world_size(), torch.device("cpu")
    config = Config(parallel=ParallelConfig(dp_replicate=1, pp=count))
    config.train.accumulate = PARTS
    config.parallel.pipeline.blocks = [LAYERS // count] * count
    mesh = Mesh(Degrees.of(config.parallel, count), distributed.get_rank(), cpu)
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps(ranks: int, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmark.pedantic(lambda: run_ranks(measure, ranks, timeout=300)[0], rounds=1)
    ratio, expected = found["ours"] / found["by hand"], bubble("1f1b", ranks, PARTS)
    with capsys.disabled():
        print(f"\n1f1b, {ranks} ranks, {PARTS} micro-batches: ", end="")
        print(f"by hand {1e3 * found['by hand']:.1f} ms, ours {ratio:.2f} x, ", end="")
        print(f"bubble {found['bubble']:.3f}, expected {expected:.3f}")
    assert 0 < found["bubble"] < 1
