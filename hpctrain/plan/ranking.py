"""The layouts that fit, best first, with the reason; the hardware on which a run fits; more nodes.

In a row of `scaling` the global batch stays the same (strong scaling), so each rank gets less of
it. Efficiency is the speed of a GPU as a part of that on the smallest number of nodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.hardware import Hardware
from hpctrain.plan.layouts import Layout, layouts
from hpctrain.plan.predicting.accuracy import compared
from hpctrain.plan.predicting.estimate import Estimate, Estimator, readable, speed

_MOST_NODES = 4096


@dataclass(frozen=True)
class Ranking:
    """The layouts of one kind of hardware."""

    best: list[Estimate]  # those that fit, one for each way to divide the model, best first
    excluded: dict[str, str]  # with the reason
    # Those that fit, but take more than they may.
    over: list[Estimate] = field(default_factory=list)


def rank(
    config: Config, estimator: Estimator, hardware: Hardware, sizes: Iterable[tuple[int, int]]
) -> Ranking:
    """Return the layouts for given numbers of nodes."""
    found: list[Estimate] = []
    over: list[Estimate] = []
    excluded: dict[str, str] = {}
    for nodes, per_node in sizes:
        groups = layouts(config, nodes, per_node, estimator.modes, excluded, estimator.divisible)
        for group in groups:
            name = f"{group[0].kind} on {group[0].ranks} rank{'s' if group[0].ranks > 1 else ''}"
            try:
                estimates = _of_group(group, estimator, hardware)
            except ConfigError as error:
                excluded[name] = str(error).splitlines()[0]
                continue
            possible = [estimate for estimate in estimates if estimate.fits is not False]
            if possible:
                fastest = min(possible, key=speed)
                if reason := estimator.limits.exceeded(*fastest.bill):
                    excluded[name] = reason
                (over if reason else found).append(fastest)
                continue
            limit = hardware.memory_bytes or 0
            full = group[-1].config.train.activation_checkpointing == "full"
            excluded[name] = (
                f"needs {readable(estimates[-1].memory.total)} of {readable(limit)} per GPU, also "
                f"with {'full activation checkpointing and ' * full}the smallest "
                "micro-batch"
            )
    found.sort(key=lambda e: (e.layout.ranks, speed(e)))
    return Ranking([replace(e, reason=_reason(e)) for e in found], excluded, over)


def _of_group(group: list[Layout], estimator: Estimator, hardware: Hardware) -> list[Estimate]:
    """Return the estimates of layouts among which the fastest is; the last needs least memory."""
    first = group[0].config.train.activation_checkpointing
    whole = [layout for layout in group if layout.config.train.activation_checkpointing == first]
    found = [estimator.of(layout, hardware) for layout in whole]
    if all(estimate.fits for estimate in found):
        return found  # what computes twice is slower, and measuring it takes seconds
    least = estimator.of(group[-1], hardware)
    if least.fits is False:
        return [least]
    return [*found, *(estimator.of(layout, hardware) for layout in group[len(whole) : -1]), least]


def sizes_of(hardware: Hardware, nodes: list[int] | None, per_node: int) -> list[tuple[int, int]]:
    """Return the numbers of nodes and ranks to look at."""
    whole = per_node or hardware.gpus_per_node or 1
    if nodes is not None:
        return [(n, whole) for n in nodes]
    parts = [(1, n) for n in (1, 2, 4, 8, 16, 32, 64) if n < whole] if not per_node else []
    return [*parts, *((n, whole) for n in (1, 2, 4))]


def smallest(
    config: Config, estimator: Estimator, hardware: Hardware, per_node: int = 0
) -> Estimate | None:
    """Return the best layout on the smallest number of GPUs that is enough, or None."""
    whole, nearest = per_node or hardware.gpus_per_node or 1, math.inf
    sizes = sizes_of(hardware, None, per_node)[:-2]
    nodes = 2
    while nodes <= _MOST_NODES:
        sizes.append((nodes, whole))
        nodes *= 2
    for size in sizes:
        ranks = size[0] * size[1]
        if ranks > config.train.global_batch_size * whole:
            break
        if estimator.least(config.precision, config.optimizer, ranks) > (
            hardware.memory_bytes or math.inf
        ):
            continue
        found = rank(config, estimator, hardware, [size])
        if found.best:
            return min(found.best, key=speed)
        if found.over:  # more GPUs may be faster, until they are not
            excess = min(estimator.limits.excess(*each.bill) for each in found.over)
            if excess >= nearest:
                break
            nearest = excess
    return None


def on(config: Config, hardware: Hardware) -> Config:
    """Return the config for another kind of GPU, in a number format that it has."""
    changed = copy.deepcopy(config)
    if hardware.peak(changed.precision.compute) is None and hardware.peak_flops:
        changed.precision.compute = "bf16"
    return changed


def _reason(estimate: Estimate) -> str:
    layout, degrees = estimate.layout, estimate.layout.degrees
    mode = layout.config.train.activation_checkpointing
    kind = layout.kind.partition("+")[0]
    parts = [WHY[kind]] if kind in WHY else []
    if degrees.tp > 1:
        parts.append(f"tensor parallel of {degrees.tp} inside a node divides wide layers")
    if degrees.cp > 1:
        parts.append(f"context parallel of {degrees.cp} divides each sequence")
    if layout.config.parallel.ep > 1:
        parts.append(f"the experts are divided over {layout.config.parallel.ep} ranks")
    if layout.config.parallel.fsdp.offload:
        parts.append("what the optimizer needs is in the memory of the host, which is slow")
    if degrees.pp > 1:
        parts.append(f"a pipeline of {degrees.pp} stages sends little between nodes")
    if mode != "none":
        parts.append(f"{mode} activation checkpointing makes room")
    if degrees.pp > 1:
        parts.append(f"{layout.batch.accumulate} micro-batches keep its stages busy")
    elif layout.batch.accumulate > 1:
        parts.append(f"{layout.batch.accumulate} micro-batches make room")
    parts += [unlike] if (unlike := compared(layout)) else []
    return "; ".join(parts)


WHY = {
    "single": "one GPU holds everything, so nothing is sent",
    "ddp": "each GPU holds the whole model, so only gradients are sent",
    "zero1": "the optimizer state is divided, parameters are gathered once a step",
    "zero2": "gradients are divided too, parameters are gathered once a step",
    "zero3": "parameters are divided too, which takes the least memory",
    "hsdp": "each node has a replica, so that parameters are gathered inside a node",
}


@dataclass(frozen=True)
class Scaled:
    """A number of nodes."""

    estimate: Estimate  # the fastest layout that fits
    efficiency: float  # speed of a GPU, as a part of that on the fewest GPUs

    def as_json(self) -> dict[str, Any]:
        """Return the entry of `--json`."""
        entry = self.estimate.as_json()
        names = ("nodes", "ranks", "overrides", "step_s", "samples_per_s", "tokens_per_s_per_gpu")
        return {**{name: entry[name] for name in names}, "efficiency": self.efficiency}


def scaling(estimates: Iterable[Estimate]) -> list[Scaled]:
    """Return a row for each number of whole nodes, from the smallest; at least two, or none."""
    fastest: dict[int, Estimate] = {}
    widest: dict[int, int] = {}
    for estimate in estimates:
        layout = estimate.layout
        if estimate.time is None or layout.ranks < widest.get(layout.nodes, 0):
            continue
        known = fastest.get(layout.nodes)
        if known is None or layout.ranks > known.layout.ranks or speed(estimate) < speed(known):
            fastest[layout.nodes], widest[layout.nodes] = estimate, layout.ranks
    if len(fastest) < 2:
        return []
    rows = [fastest[nodes] for nodes in sorted(fastest)]
    rates = [(row.samples_per_s or 0.0) / row.layout.ranks for row in rows]
    return [Scaled(row, rate / rates[0]) for row, rate in zip(rows, rates, strict=True)]
