"""A step of the perceptron of `experiment=digits` beside a loop by hand: the share of the host.

python -m tests.gpu.bench_digits [--device cpu]

The step is so short that the GPU waits for the host. Both loops train one model with the optimizer
of a run on one batch, and take turns.
"""

import argparse
import functools
import json
import statistics

import torch
import torch.nn.functional as F

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.config.sections import LoopSections
from hpctrain.engine.building.build_optimizer import build_optimizer
from hpctrain.engine.building.parts import training_of
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.recipe import parallelize
from hpctrain.models import MLP
from hpctrain.tasks import Classification
from tests.gpu.bench_gpt2 import CLIP, LR, seconds
from tests.steps import batch, step_of

TURNS, STEPS = 9, 200


def main() -> None:
    """Measure; the last two lines are a note and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    kind = parser.parse_args().device
    device = torch.device(kind, 0 if kind == "cuda" else None)
    config, mesh = Config(), Mesh(Degrees(), 0, device)
    made = functools.partial(MLP, 64, [256, 256], 10)
    precision = Precision(config.precision, device)
    model = parallelize(
        made, config.parallel, mesh, precision, training_of(LoopSections.of(config), mesh)
    )
    optimizer = build_optimizer(config.optimizer, model)
    own = step_of(model, Classification(), optimizer, clip_norm=CLIP)
    samples = {name: values.to(device) for name, values in batch(64).items()}
    image, label = samples["image"].float(), samples["label"].long()

    def by_hand() -> None:
        F.cross_entropy(model.module(image), label).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    loops = {"ours": lambda: own(samples, LR), "by_hand": by_hand}
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
