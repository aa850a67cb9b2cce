"""The sizes of a batch, from all ranks down to what a rank computes at a time.

global 512 = shares 8 x accumulate 2 x micro 32        share 64 = accumulate 2 x micro 32

With train.batch_size_ramp the first steps have smaller global sizes, and each must be divisible.
With parallel.weights a rank makes as many micro-batches as it has shares, times train.accumulate:

    weights [2, 1], 2 nodes x 2 ranks, 6 shares ── rank 0: 0 1, rank 1: 2 3, rank 2: 4, rank 3: 5
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import LaunchConfig, ParallelConfig, TrainConfig


class BatchSizeRamp(NamedTuple):
    """The global batch sizes of a run."""

    # The sizes that come first, each with the number of its steps.
    stages: tuple[tuple[int, int], ...]
    final: int  # the size of all steps after them

    @classmethod
    def of(cls, final: int, stages: Sequence[Mapping[str, int]]) -> Self:
        """Return what the values of train.global_batch_size and train.batch_size_ramp say."""
        sizes = [(stage["global_batch_size"], stage) for stage in stages]
        pairs = [(n, s["steps"] if "steps" in s else -(-s["samples"] // n)) for n, s in sizes]
        return cls(tuple(pairs), final)

    def samples(self, steps: int) -> int:
        """Return the samples of the first `steps` steps."""
        total = 0
        for size, length in self.stages:
            total += size * min(steps, length)
            steps -= min(steps, length)
        return total + self.final * steps

    def steps(self, samples: int) -> int:
        """Return the steps that have `samples` samples; a part of a step counts as one."""
        total = 0
        for size, length in self.stages:
            here = min(-(-samples // size), length)
            total += here
            samples = max(0, samples - here * size)
        return total + -(-samples // self.final)


def _shares(parallel: ParallelConfig, dp: int) -> int:
    """Return the number of shares of `dp` ranks; one of a node with weight W takes W of them."""
    weights = parallel.weights
    return dp if weights is None else sum(weights) * (dp // len(weights))


@dataclass(frozen=True)
class BatchSizes:
    """How the samples of a step are divided, at the start of a run."""

    global_size: int  # the samples of a step over all ranks (`train.global_batch_size`)
    # The equal shares into which they are divided. A rank has one, or with `parallel.weights` as
    # many as its weight.
    shares: int
    accumulate: int  # the micro-batches of a share; `train.micro_batch_size=auto` begins with 1

    @classmethod
    def of(
        cls, train: TrainConfig, parallel: ParallelConfig, degrees: Degrees, size: int | None = None
    ) -> Self:
        """Return the sizes of a training for a global `size`; None is the one after the ramp."""
        parts = _shares(parallel, degrees.dp)
        size, number = size or train.global_batch_size, train.accumulate
        if train.micro_batch_size not in (None, "auto"):
            number = size // (parts * int(str(train.micro_batch_size)))
        return cls(size, parts, number)

    @property
    def share(self) -> int:
        """The samples of a share."""
        return self.global_size // self.shares

    @property
    def micro(self) -> int:
        """The samples of a micro-batch."""
        return self.share // self.accumulate


def ramp_of(train: TrainConfig) -> BatchSizeRamp:
    """Return the global batch sizes of a run."""
    return BatchSizeRamp.of(train.global_batch_size, train.batch_size_ramp)


def named_sizes(train: TrainConfig) -> dict[str, int]:
    """Return the global batch sizes of a run by the keys that give them, the smallest first."""
    stages: list[dict[str, Any]] = train.batch_size_ramp
    return {
        f"train.batch_size_ramp[{i}].global_batch_size": stage["global_batch_size"]
        for i, stage in enumerate(stages)
    } | {"train.global_batch_size": train.global_batch_size}


def parts_of_ramp(
    train: TrainConfig, parallel: ParallelConfig, degrees: Degrees, weight: int = 1
) -> dict[int, int]:
    """Return the micro-batches of a rank, which has `weight` shares, for each number of its rows.

    The dict is empty if all steps have the same rows.
    """
    sizes = named_sizes(train).values() if train.batch_size_ramp else ()
    stages = [BatchSizes.of(train, parallel, degrees, size) for size in sizes]
    return {stage.share * weight: stage.accumulate * weight for stage in stages}


def problems(train: TrainConfig, parallel: ParallelConfig, degrees: Degrees) -> Iterator[str]:
    """Yield what is wrong with the sizes of the batch and its parts."""
    sizes, size, weights = named_sizes(train), train.micro_batch_size, parallel.weights
    number = int(size) if size is not None and size != "auto" else train.accumulate
    name = "micro_batch_size" if size not in (None, "auto") else "accumulate"
    dp = _shares(parallel, degrees.dp)
    parts = f"dp {dp}" if weights is None else f"{dp} shares of parallel.weights={weights}"
    share = dp * number
    for key, batch in sizes.items():
        if batch % share:
            below = batch // share * share
            near = " or ".join(str(size) for size in (below, below + share) if size > 0)
            yield (
                f"{key}={batch} is not divisible by {parts} x train.{name} {number} = {share}: "
                f"use {near}"
            )
    for (key, batch), (after, larger) in itertools.pairwise(sizes.items()):
        if batch >= larger:
            yield f"{key}={batch} with {after}={larger}: the batches of a ramp must grow"


def nodes_problem(weights: Sequence[int], nodes: int) -> str:
    """Return why so many nodes do not fit `parallel.weights`; "" if they do."""
    if nodes == len(weights):
        return ""
    numbers = f"{len(weights)} numbers, but the job has {nodes} nodes; give one for each"
    return f"parallel.weights={weights}: {numbers}"


def weight_problems(
    launch: LaunchConfig, weights: Sequence[int] | None, degrees: Degrees
) -> Iterator[str]:
    """Yield why the nodes do not fit `parallel.weights`."""
    ranks = degrees.ranks
    if weights is None:
        return
    nodes, rest = divmod(ranks, launch.tasks_per_node)
    if rest or nodes not in launch.node_numbers:  # torchrun and sbatch start other numbers of ranks
        nodes = len(weights)
    if problem := nodes_problem(weights, nodes):
        yield problem
    elif ranks % nodes:
        yield (
            f"parallel.weights={weights}: {nodes} nodes cannot have the same number of {ranks} "
            "ranks"
        )
