"""`python -m hpctrain status --checkpoints [RUN...]`: list checkpoints, or verify them.

The manifest of a checkpoint says everything but whether its files are as they were written.
"""

import argparse
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from hpctrain.base.names.metric_names import main_metric
from hpctrain.base.names.step_names import step_name, step_of
from hpctrain.base.terminal.console import Cell, Console, Table, print_json
from hpctrain.base.terminal.terminal import printable
from hpctrain.errors import StorageError
from hpctrain.runs.checkpoints.manifest import NOT_HEALTHY, Manifest, checkpoints, damage
from hpctrain.runs.chosen_checkpoint import best_step
from hpctrain.runs.state.facts import Facts
from hpctrain.runs.state.select import add_arguments, select

_COLUMNS = ("run", "step", "epoch", "saved", "size", "ranks", "kept", "metric", "files")


@dataclass(frozen=True)
class _Row:
    """One checkpoint."""

    run: Facts
    path: Path
    manifest: Manifest | None  # None if it cannot be read
    kept: str  # why it is kept: it is the latest, or a spare one in case a newer one is damaged
    # What is wrong, with the name of a file; "" if nothing, None if it is not known.
    problem: str | None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric when it was saved."""
        return self.manifest.metrics if self.manifest else {}

    @property
    def metric(self) -> tuple[str, float] | None:
        """Name and value of the main metric of the run; None without one."""
        name = main_metric(self.run.progress.metric, self.metrics)
        return (name, self.metrics[name]) if name else None

    def cells(self, shared: str) -> list[Cell]:
        """Return the cells, one for each of _COLUMNS; the metric without the name `shared`."""
        found, main_metric = self.manifest, self.metric
        epoch = self.metrics.get("train/epoch")
        degrees = found.layout if found else {}
        layout = ", ".join(f"{name} {size}" for name, size in degrees.items())
        saved = f"{datetime.fromtimestamp(found.time):%d %b %H:%M}" if found else ""
        state = {None: "", "": "intact"}.get(self.problem, f"DAMAGED: {self.problem}")
        return [
            Cell(self.run.name, no_wrap=True),
            Cell(f"{step_of(self.path):,}"),
            Cell("" if epoch is None else f"{epoch:g}"),
            Cell(saved, no_wrap=True),
            Cell(decimal(found.size) if found else "", no_wrap=True),
            Cell(f"{found.world_size}" + f" ({layout})" * bool(layout) if found else ""),
            Cell(self.kept),
            Cell(
                "" if main_metric is None else "{} {:.4g}".format(*main_metric).removeprefix(shared)
            ),
            Cell(state, style="red" if self.problem else "green"),
        ]

    def facts(self) -> dict[str, Any]:
        """Return the row for --json."""
        found, main_metric = self.manifest, self.metric
        return {
            "run": str(self.run.path),
            "checkpoint": str(self.path),
            "step": step_of(self.path),
            "epoch": self.metrics.get("train/epoch"),
            "time": found and found.time,
            "bytes": found and found.size,
            "ranks": found and found.world_size,
            "layout": found and found.layout,
            "kept": self.kept,
            "metric": main_metric and main_metric[0],
            "metrics": self.metrics,
            "problem": self.problem,
        }


def main(argv: list[str]) -> int:
    """Print the table; return the exit code: 1 if a checkpoint is damaged."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status --checkpoints",
        description="List the checkpoints of runs, the newest first: step, epoch, time, size, "
        "ranks, why it is kept, metric. The exit code is 1 if one is damaged.",
    )
    add_arguments(parser, "default: all")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all files and compare their digests; without it only the manifests are read",
    )
    options = parser.parse_args(argv)
    runs = [Facts.read(path) for path in select(options.dir, options.runs)]
    rows = [row for run in runs for row in look(run, verify=options.verify)]
    if options.json:
        print_json([row.facts() for row in rows])
    else:
        _show(rows)
    damaged = [run.damage for run in runs if run.damage]
    damaged += [f"{row.path}: {row.problem}" for row in rows if row.problem]
    for problem in damaged:
        print(printable(f"damaged: {problem}"), file=sys.stderr)
    return 1 if damaged else 0


def look(run: Facts, *, verify: bool) -> list[_Row]:
    """Return the checkpoints of a run, the newest first; to `verify` is to read all files."""
    rows = []
    best = best_step(run.path, run.record)
    for number, path in enumerate(checkpoints(run.path / "checkpoints")):
        manifest, problem = None, damage(path) if verify else None
        try:
            manifest = Manifest.read(path)
            problem = problem if manifest.healthy else NOT_HEALTHY
        except StorageError as error:
            problem = str(error).removeprefix(f"{path}/")
        kept = "spare" if number else "latest"
        if path.name == step_name(best):
            kept = "best" if number else "latest, best"
        rows.append(_Row(run, path, manifest, kept, problem))
    return rows


def _show(rows: list[_Row]) -> None:
    if not rows:
        print("no checkpoints here")
        return
    size = decimal(sum(row.manifest.size for row in rows if row.manifest))
    print(f"{len(rows)} checkpoint{'s' * (len(rows) > 1)}, {size}")
    metrics = {row.metric[0] for row in rows if row.metric}
    shared = metrics.pop() if len(metrics) == 1 else ""
    titles = [shared or "metric" if title == "metric" else title for title in _COLUMNS]
    table = Table(*titles)
    for row in rows:
        table.add_row(*row.cells(f"{shared} "))
    Console().print(table)
