"""What more nodes give: the fastest layout on each number of nodes, beside the smallest number.

The global batch stays the same (strong scaling), so each rank gets less of it. Efficiency is the
speed of a GPU as a part of that on the smallest number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.plan.predicting.estimate import Estimate, speed


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
