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

from hpctrain.config.rules.pipeline_schedule import bubble
from hpctrain.config.schema import ParallelConfig
from hpctrain.models import Transformer
from hpctrain.models.attention import rotary
from hpctrain.training.step import TrainStep
from tests.benchmarks.steps_in_turns import CPU, LAYERS, WARM, Batch, Step, medians, model, ours
from tests.ranks import run_ranks

PARTS, ROUNDS, RANKS = 8, 20, 4


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


def by_hand() -> Step:
    """Return a training step, with the same clipping of the global norm."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    part = Part(model(), rank, count)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    schedule = Schedule1F1B(PipelineStage(part, rank, count, CPU), PARTS, loss_fn=loss_of)

    def step(batch: Batch) -> None:
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


def pipeline(build: Callable[[], Transformer] = model, schedule: str = "1f1b") -> TrainStep:
    parallel = ParallelConfig(dp_replicate=1, pp=distributed.get_world_size())
    parallel.pipeline.schedule = schedule
    return ours(parallel, build, accumulate=PARTS)


def measure() -> dict[str, float]:
    """Return the median seconds of a step by name, and the bubble."""
    torch.set_num_threads(1)
    step, bubbles = pipeline(), []

    def together(one: Step) -> Step:
        def until_all_are_done(batch: Batch) -> None:
            one(batch)
            distributed.barrier()

        return until_all_are_done

    made = {"by hand": together(by_hand()), "ours": together(lambda batch: step(batch, 1e-3))}
    found = medians(
        *(made, 2 * PARTS, ROUNDS), lambda: bubbles.append(step.totals.means()["bubble"])
    )
    return found | {"bubble": statistics.median(bubbles[WARM:])}


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
        step = pipeline(napping, name)
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
