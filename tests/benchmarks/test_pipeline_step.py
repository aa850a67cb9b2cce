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

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.faults.stop import Stop
from hpctrain.models import Transformer
from hpctrain.models.attention import rotary
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.tasks import LanguageModel
from hpctrain.training.step import TrainStep
from tests.ranks import run_ranks

LAYERS, PARTS, ROUNDS, VOCABULARY = 4, 8, 20, 256
RANKS = 4


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


def ours(
    build: Callable[[], Transformer] = model, schedule: str = "1f1b"
) -> tuple[Callable[[dict[str, torch.Tensor]], object], TrainStep]:
    count, cpu = distributed.get_world_size(), torch.device("cpu")
    config = Config(parallel=ParallelConfig(dp_replicate=1, pp=count))
    config.train.accumulate = PARTS
    config.parallel.pipeline.schedule = schedule
    mesh = Mesh(Degrees.of(config.parallel, count), distributed.get_rank(), cpu)
    made = parallelize(build, config, mesh, Precision(config.precision, cpu))
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


class Nap(torch.autograd.Function):
    """Takes the same time in every pass, without a core: ranks may be more than cores."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return gradient


def napping() -> Transformer:
    made = Transformer(64, 16, 2 * RANKS, 2)
    for layer in made.layers:
        layer.register_forward_hook(lambda layer, arguments, out: Nap.apply(out))
    return made


def naps(schedules: list[str]) -> dict[str, float]:
    """Return the median of the measured bubble of each schedule."""
    torch.set_num_threads(1)
    found = {}
    for name in schedules:
        _, step = ours(napping, name)
        bubbles = []
        for _ in range(6):
            batch = {
                "tokens": torch.zeros(PARTS, 9, dtype=torch.int64),
                "mask": torch.ones(PARTS, dtype=torch.bool),
            }
            step(batch, 1e-3)
            bubbles.append(step.totals.means()["bubble"])
        found[name] = statistics.median(bubbles[1:])
    return found


def test_the_bubble_is_that_of_the_textbook(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["gpipe", "1f1b", "interleaved"]
    found = benchmark.pedantic(lambda: run_ranks(naps, RANKS, names, timeout=300)[0], rounds=1)
    for name, measured in found.items():
        expected = bubble(name, RANKS, PARTS)
        with capsys.disabled():
            print(
                f"\n{name}, {RANKS} ranks: bubble {measured:.3f}, expected {expected:.3f}", end=""
            )
        assert measured == pytest.approx(expected, abs=0.1)
