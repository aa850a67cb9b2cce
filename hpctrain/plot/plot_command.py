"""`python -m hpctrain plot RUN...`: draw the curves of runs from their journals, without a server.

run directories ── journal, monitor ── curves ──┬── text in the terminal
                                                └── --out FILE.png or FILE.html
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path

from hpctrain.commands.select import add_dir, select
from hpctrain.console import Console
from hpctrain.errors import ConfigError
from hpctrain.plot import curves, figure_file, text_plot
from hpctrain.plot.curves import RunCurves
from hpctrain.tracking.journal import journal_path

_FIRST = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")
_LINES = 10


def main(argv: list[str]) -> int:
    """Draw the runs in `argv`.

    Raises:
        ConfigError: An argument is wrong, or a metric is in none of the runs.
        StorageError: A run does not exist or has tracked nothing, or the file cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m hpctrain plot", description=__doc__)
    parser.description = "Draw the curves of runs in the terminal, or with --out as a file."
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="directories, names, or their starts"
    )
    add_dir(parser)
    parser.add_argument("--metric", action="append", default=[], metavar="KEY", help="repeatable")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a .png or .html file")
    parser.add_argument(
        "--smooth", type=float, default=0.0, metavar="0..1", help="weight of a moving average"
    )
    parser.add_argument("--log-x", action="store_true", help="a logarithmic axis of steps")
    parser.add_argument("--log-y", action="store_true", help="a logarithmic axis of values")
    options = parser.parse_args(argv)
    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth {options.smooth:g}: it must be at least 0 and less than 1")
    if options.out:
        figure_file.check(options.out)
    elif options.log_x:
        raise ConfigError("--log-x needs --out: the terminal has a linear axis of steps")
    paths = select(options.dir, options.runs)
    # Of many runs some have not begun; one of them stops no picture of the others.
    tracked = [path for path in paths if journal_path(path).is_file()] or paths
    runs = [curves.load(path) for path in tracked]
    metrics = _chosen(runs, options.metric)
    if options.out:
        logs = options.log_x, options.log_y
        figure_file.write(options.out, runs, metrics, options.smooth, *logs)
        print(options.out)
        return 0
    console = Console()
    for metric in metrics:
        found = [
            (run.name, curves.thinned(curves.smoothed(run.metrics[metric], options.smooth), 500))
            for run in runs
            if metric in run.metrics
        ]
        width = min(console.width, 100)
        console.print(text_plot.draw(metric, found, width, _LINES, options.log_y))
    if len(tracked) < len(paths):
        console.print(f"{len(paths) - len(tracked)} runs have tracked nothing", style="dim")
    for run in runs:
        if run.restarts:
            steps = ", ".join(f"{step:,}" for step in run.restarts)
            console.print(f"{run.name}: later attempts begin at step {steps}", style="dim")
    return 0


def _chosen(runs: Sequence[RunCurves], asked: Sequence[str]) -> list[str]:
    known = sorted({name for run in runs for name in run.metrics})
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--metric {name}: {hint}there are {', '.join(known) or 'none'}")
    if asked:
        return list(dict.fromkeys(asked))
    return [name for name in _FIRST if name in known] or known[:4]
