"""Measured beside predicted, best first: as a table, and for `--json`."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hpctrain.console import Console, Table
from hpctrain.errors import LaunchError
from hpctrain.plan.measured.measurement import MOST, Measured
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.plan.printing import command_of
from hpctrain.units import GIB


class Comparison:
    """The layouts that were measured; `overrides` are those of the command line.

    They are ranked by nodes and ranks, then by the measured step; a failed one is last.
    """

    def __init__(self, results: Sequence[Measured], overrides: Sequence[str]) -> None:
        self._overrides = overrides
        self.ranked = sorted(results, key=lambda one: (*_size(one), one.step_s or math.inf))

    @property
    def fastest(self) -> list[Measured]:
        """The fastest layout of each number of nodes and ranks, of those that were measured."""
        good = [one for one in self.ranked if one.found is not None]
        return [next(group) for _, group in itertools.groupby(good, _size)]

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 if a layout was measured."""
        return 0 if self.fastest else LaunchError.exit_code

    def put_into(self, answer: dict[str, Any], estimates: Sequence[Estimate]) -> None:
        """Add what was measured to the object that `--json` prints."""
        by_id = {id(one.estimate): one for one in self.ranked}
        for entry, estimate in zip(answer["layouts"], estimates, strict=True):
            one = by_id.get(id(estimate))
            entry["measured"] = one and one.as_json()
            if one is None:
                entry["not_measured"] = f"not one of the first {MOST} on its number of ranks"
            elif one.found is None:
                entry["not_measured"] = one.cause
            elif one.cause:
                entry["measured"]["note"] = one.cause
        fastest = [
            {
                "nodes": layout.nodes,
                "ranks": layout.ranks,
                "overrides": [*layout.overrides],
                "command": command_of(self._overrides, layout.overrides),
                "step_s": one.step_s,
            }
            for one in self.fastest
            for layout in [one.estimate.layout]
        ]
        runs = [str(one.run) for one in self.ranked]
        answer["measurement"] = {"fastest": fastest, "runs": runs}

    def show(self, console: Console) -> None:
        """Print the table, and the commands that follow from it."""
        console.print("\nmeasured beside predicted; an error is that of the prediction")
        console.print(self._table())
        for one in filter(lambda one: one.cause, self.ranked):
            console.print(f"{one.estimate.layout.name}: {one.cause}")
            if one.found is None:
                console.print(f"  its log: python -m hpctrain logs {one.run}", soft_wrap=True)
        for one in self.fastest:
            layout = one.estimate.layout
            ranks = f"{layout.ranks} rank{'s' * (layout.ranks > 1)}"
            console.print(f"\nthe fastest on {ranks}: {layout.name}")
            console.print(f"  {command_of(self._overrides, layout.overrides)}", soft_wrap=True)
        if given := [f"--from-run {one.run}" for one in self.ranked if one.found is not None]:
            console.print("\nfor other sizes, plan takes what these runs have measured:")
            console.print(f"  {' '.join(given)}", soft_wrap=True)

    def _table(self) -> Table:
        tokens = any(one.estimate.tokens for one in self.ranked)
        peaks = any(one.found and one.found.peak_bytes for one in self.ranked)
        speed = "tokens/s/GPU" if tokens else "samples/s"
        names = ["layout", "ranks", "predicted", "step", "error", speed]
        names += ["predicted", "peak", "error"] if peaks else []
        table = Table(*names)
        for one in self.ranked:
            layout, time = one.estimate.layout, one.estimate.time
            rate = one.speed.tokens_per_s_per_gpu if tokens else one.speed.samples_per_s
            cells = [
                *(layout.name, str(layout.ranks), _text(time.step_s if time else None, "{:.4f} s")),
                *(_text(one.step_s, "{:.4f} s", "failed"), _text(one.step_error, "{:+.1%}")),
                _text(rate, "{:,.0f}"),
            ]
            if peaks:
                peak = None if one.found is None else one.found.peak_bytes
                sizes = one.estimate.memory.tensors / GIB, peak and peak / GIB
                cells += [_text(size, "{:.2f} GiB") for size in sizes]
                cells += [_text(one.peak_error, "{:+.1%}")]
            table.add_row(*cells)
        return table


def _size(one: Measured) -> tuple[int, int]:
    return one.estimate.layout.nodes, one.estimate.layout.ranks


def _text(value: float | None, form: str, without: str = "-") -> str:
    return without if value is None else form.format(value)
