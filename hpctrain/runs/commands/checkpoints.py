"""`python -m hpctrain status --checkpoints [RUN...]`: list checkpoints, or verify them.

The manifest of a checkpoint says everything but whether its files are as they were written.
"""

import argparse
import sys
from collections.abc import Iterator
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
    rows = [row for run in runs for row in _facts(run, verify=options.verify)]
    if options.json:
        print_json(rows)
    else:
        _show(rows)
    damaged = [run.damage for run in runs if run.damage]
    damaged += [f"{row['checkpoint']}: {row['problem']}" for row in rows if row["problem"]]
    for problem in damaged:
        print(printable(f"damaged: {problem}"), file=sys.stderr)
    return 1 if damaged else 0


def _facts(run: Facts, *, verify: bool) -> Iterator[dict[str, Any]]:
    """Yield what --json tells of each checkpoint, the newest first; to `verify` reads all files.

    `kept` is why it is kept: it is the latest, or a spare one in case a newer one is damaged.
    `problem` is what is wrong, "" if nothing is, and None if that is not known.
    """
    best = best_step(run.path, run.record)
    for number, path in enumerate(checkpoints(run.path / "checkpoints")):
        found, problem = None, damage(path) if verify else None
        try:
            found = Manifest.read(path)
            problem = problem if found.healthy else NOT_HEALTHY
        except StorageError as error:
            problem = str(error).removeprefix(f"{path}/")
        kept = "spare" if number else "latest"
        if path.name == step_name(best):
            kept = "best" if number else "latest, best"
        metrics = found.metrics if found else {}
        yield {
            "run": str(run.path),
            "checkpoint": str(path),
            "step": step_of(path),
            "epoch": metrics.get("train/epoch"),
            "time": found and found.time,
            "bytes": found and found.size,
            "ranks": found and found.world_size,
            "layout": found and found.layout,
            "kept": kept,
            "metric": main_metric(run.progress.metric, metrics) or None,
            "metrics": metrics,
            "problem": problem,
        }


def _show(rows: list[dict[str, Any]]) -> None:
    """Print the table; a metric that all checkpoints share is named once, in its head."""
    if not rows:
        print("no checkpoints here")
        return
    size = decimal(sum(row["bytes"] or 0 for row in rows))
    print(f"{len(rows)} checkpoint{'s' * (len(rows) > 1)}, {size}")
    metrics = {row["metric"] for row in rows if row["metric"]}
    shared = metrics.pop() if len(metrics) == 1 else ""
    table = Table(*(shared or title if title == "metric" else title for title in _COLUMNS))
    for row in rows:
        layout = ", ".join(f"{name} {size}" for name, size in (row["layout"] or {}).items())
        ranks = f"{row['ranks']}" + f" ({layout})" * bool(layout)
        saved = row["time"] and f"{datetime.fromtimestamp(row['time']):%d %b %H:%M}"
        metric, problem = row["metric"], row["problem"]
        last = f"{metric} {row['metrics'][metric]:.4g}" if metric else ""
        state = {None: "", "": "intact"}.get(problem, f"DAMAGED: {problem}")
        table.add_row(
            Cell(Path(row["run"]).name, no_wrap=True),
            f"{row['step']:,}",
            "" if row["epoch"] is None else f"{row['epoch']:g}",
            Cell(saved or "", no_wrap=True),
            Cell("" if row["bytes"] is None else decimal(row["bytes"]), no_wrap=True),
            "" if row["ranks"] is None else ranks,
            row["kept"],
            Cell(last.removeprefix(f"{shared} ")),
            Cell(state, style="red" if problem else "green"),
        )
    Console().print(table)
