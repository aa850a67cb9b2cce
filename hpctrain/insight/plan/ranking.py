"""The layouts that fit, best first, and the hardware on which a run fits."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import Config
from hpctrain.insight.estimates.hardware import Hardware
from hpctrain.insight.plan.layouts import Layout, layouts
from hpctrain.insight.plan.memory import on_gpu
from hpctrain.insight.plan.predicting.estimator import Estimate, Estimator

_NODES = tuple(2**n for n in range(1, 13))


class Kind(NamedTuple):
    """A kind of GPU with its smallest number that is enough."""

    hardware: Hardware
    best: Estimate | None  # None: no number is enough
    why: str = ""  # why none is


@dataclass(frozen=True)
class Ranking:
    """The layouts of one kind of hardware."""

    best: list[Estimate]  # those that fit, one for each way to divide the model, best first
    excluded: dict[str, str]  # with the reason
    lacks: str = ""  # of those that do not fit, what the nearest lacks


def rank(
    training: Config, estimator: Estimator, hardware: Hardware, sizes: Iterable[tuple[int, int]]
) -> Ranking:
    """Return the layouts for given numbers of nodes."""
    found: list[Estimate] = []
    lacking: list[tuple[float, str]] = []
    excluded: dict[str, str] = {}
    for nodes, per_node in sizes:
        for group in layouts(training, nodes, per_node, estimator.facts, excluded):
            name = group[0].label
            try:
                estimates = _of_group(group, estimator, hardware)
            except ConfigError as error:
                excluded[name] = str(error).splitlines()[0]
                continue
            if not (possible := [one for one in estimates if one.fits is not False]):
                full = group[-1].training.train.activation_checkpointing == "full"
                also = f"{'full activation checkpointing and ' * full}the smallest micro-batch"
                excluded[name] = f"{estimates[-1].fit.reason}, also with {also}"
                lacking.append((estimates[-1].memory.total, f"{name} {excluded[name]}"))
                continue
            # What is tight comes only where nothing leaves more room.
            found.append(min(possible, key=lambda one: (one.fit.tight, one.order)))
    found.sort(key=lambda one: (one.layout.ranks, one.order))
    return Ranking(found, excluded, min(lacking, default=(0.0, ""))[1])


def _of_group(group: list[Layout], estimator: Estimator, hardware: Hardware) -> list[Estimate]:
    """Return the fastest that has room with each mode of checkpointing, or else the smallest.

    With more micro-batches the memory falls, and the time falls (in a pipeline) before it rises. So
    halving finds the best number in a few estimates.
    """
    estimate = cache(lambda n: estimator.of(group[n], hardware))
    found: list[Estimate] = []
    begin = 0
    for _, alike in groupby(group, lambda one: one.training.train.activation_checkpointing):
        least = len(group) - 1
        if begin and estimate(least).fits is False:
            return [estimate(least)]
        numbers = range(begin + len(list(alike)) - 1)
        first = bisect_left(numbers, True, begin, key=lambda n: estimate(n).has_room)
        best = bisect_left(
            numbers, True, first, key=lambda n: estimate(n).order <= estimate(n + 1).order
        )
        found.append(estimate(best))
        if first == 0 and found[0].fits and found[0].has_room:
            break  # what computes twice is slower, and measuring it takes seconds
        begin = len(numbers) + 1
    return found


def sizes_of(hardware: Hardware, nodes: list[int] | None, per_node: int) -> list[tuple[int, int]]:
    """Return the numbers of nodes and ranks to look at."""
    whole = per_node or hardware.gpus_per_node or 1
    if nodes is not None:
        return [(n, whole) for n in nodes]
    parts = [(1, n) for n in (1, 2, 4, 8, 16, 32, 64) if n < whole] if not per_node else []
    return [*parts, *((n, whole) for n in (1, 2, 4))]


def smallest(training: Config, estimator: Estimator, hardware: Hardware, per_node: int = 0) -> Kind:
    """Return the best layout on the smallest number of GPUs that is enough.

    What is tight counts only if no number leaves more room.
    """
    tight: Estimate | None = None
    why, whole_batch = "", training.train.global_batch_size
    whole = per_node or hardware.gpus_per_node or 1
    few = sizes_of(hardware, None, per_node)[:-2]
    for size in (*few, *((nodes, whole) for nodes in _NODES)):
        ranks = math.prod(size)
        if ranks > whole_batch * whole:
            why += f"; train.global_batch_size={whole_batch} is too small for more"
            break
        least = estimator.least(training, ranks)
        if (fit := on_gpu(least, hardware.memory_bytes, complete=False)).possible is False:
            why = f"each of {ranks} GPUs {fit.reason}"
            continue
        found = rank(training, estimator, hardware, [size])
        if roomy := [each for each in found.best if each.has_room]:
            return Kind(hardware, roomy[0])
        tight = tight or next(iter(found.best), None)
        why = found.lacks or why or next(reversed(found.excluded.values()), "")
    return Kind(hardware, tight, "" if tight else why)


def by_cost(kinds: Iterable[Kind]) -> list[Kind]:
    """Return that whose steps are cheapest first; without that, that of the fewest GPUs.

    Those with an unknown or assumed speed come behind those that published runs cover.
    """
    found = [*kinds]
    prices = [kind.hardware.price_per_hour for kind in found if kind.best]
    several = len({price.currency for price in prices if price}) > 1

    def cost(kind: Kind) -> tuple[bool, bool, bool, float]:
        if (one := kind.best) is None:
            return True, True, True, 0.0
        price, amount = kind.hardware.price_per_hour, 1.0
        if known := price is not None and one.time is not None and not several:
            amount = price.amount * one.time.step_s
        return False, one.assumed or one.time is None, not known, amount * one.layout.ranks

    return sorted(found, key=cost)


def on(training: Config, hardware: Hardware) -> Config:
    """Return the training for another kind of GPU, in a number format that it has."""
    precision = training.precision
    unknown = hardware.peak(precision.compute) is None and hardware.peak_flops
    if not unknown or precision.compute == "fp64":
        return training
    return replace(training, precision=replace(precision, compute="bf16"))
