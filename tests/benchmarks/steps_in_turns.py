"""Training steps on gloo ranks that take turns: ours, and those of loops written by hand."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import distributed

from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.models import Transformer
from hpctrain.tasks import LanguageModel
from tests.parallel.parity import spread
from tests.steps import step_of

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], object]

VOCABULARY, LAYERS, WARM = 256, 4, 3


def model() -> Transformer:
    return Transformer(VOCABULARY, 128, LAYERS, 4)


def ours(
    parallel: ParallelConfig,
    build: Callable[[], Transformer] = model,
    *,
    accumulate: int = 1,
    loss_parallel: bool = False,
) -> TrainStep:
    """Return the step that hpctrain makes; it takes the batch and the learning rate."""
    config = Config(parallel=parallel)
    config.train.accumulate = accumulate
    made = spread(build, config, loss_parallel=loss_parallel)
    adam = torch.optim.AdamW(made.parameters)
    return step_of(made, LanguageModel(), adam, clip_norm=1.0)


def updates(parameters: Iterable[torch.nn.Parameter]) -> Callable[[], None]:
    """Return what a loop by hand does after the backward pass: clip, step, and free."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def medians(
    made: Mapping[str, Step], rows: int, rounds: int, after: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median seconds of a step by name, on batches of `rows` samples.

    `after` is called after each round, and is not measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + WARM):
        draw = torch.Generator().manual_seed(number)
        batch = {
            "tokens": torch.randint(0, VOCABULARY, (rows, 129), generator=draw),
            "mask": torch.ones(rows, dtype=torch.bool),
        }
        for name, step in made.items():
            distributed.barrier()
            began = time.perf_counter()
            step(batch)
            seconds[name].append(time.perf_counter() - began)
        after()
    return {name: statistics.median(values[WARM:]) for name, values in seconds.items()}
