"""A step of the perceptron of `experiment=digits` beside a loop by hand: the share of the host.

python -m tests.gpu.bench_digits [--device cpu]

The step is so short that the GPU waits for the host. Both loops train one model with the optimizer
of a run on one batch, and take turns.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hpctrain.config.schema import Config
from hpctrain.data.shards.types import Batch
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.models import MLP
from hpctrain.tasks import Classification
from tests.gpu.bench_gpt2 import CLIP, built, ours, seconds
from tests.steps import batch

TURNS, STEPS = 9, 200


def by_hand(
    model: ParallelModel, optimizer: torch.optim.Optimizer, batch: Batch
) -> Callable[[], None]:
    """Return the step that a user would write."""

    def step() -> None:
        F.cross_entropy(model.module(batch["image"].float()), batch["label"]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Measure; the last two lines are a note and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    kind = parser.parse_args().device
    device = torch.device(kind, 0 if kind == "cuda" else None)
    model, optimizer = built(functools.partial(MLP, 64, [256, 256], 10), Config(), device)
    samples = {name: values.to(device) for name, values in batch(64).items()}
    loops = {
        "ours": ours(model, optimizer, samples, Classification()),
        "by_hand": by_hand(model, optimizer, samples),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, step in loops.items():
            spent = seconds(step, STEPS if turn else 20, kind)  # the first ones warm up
            times[name] += [1e6 * spent] * bool(turn)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratio = medians["ours"] / medians["by_hand"]
    print(f"{medians['ours']:.0f} us a step, by hand {medians['by_hand']:.0f} us: {ratio:.2f} x")
    print(json.dumps({f"{name}_us": value for name, value in medians.items()} | {"ratio": ratio}))


if __name__ == "__main__":
    main()
