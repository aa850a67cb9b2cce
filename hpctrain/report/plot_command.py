"""`python -m hpctrain plot RUN...`: draw the curves of runs from their journals, without a server.

run directories ── journal, monitor ── curves ──┬── text in the terminal
                                                └── --out FILE.png or FILE.html
"""

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hpctrain.console import Console
from hpctrain.errors import ConfigError, StorageError
from hpctrain.report.account.history import History
from hpctrain.report.account.usage import Usage
from hpctrain.report.views import output, text_plot
from hpctrain.report.views.curves import smoothed, thinned
from hpctrain.runs.state.select import add_dir, select
from hpctrain.tracking.journal import journal_path

_FIRST = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")
_LINES, _POINTS, _MOST_SYSTEM = 10, 1000, 12
Runs = Mapping[str, tuple[History, Usage]]


def main(argv: list[str]) -> int:
    """Draw the runs in `argv`."""
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
        output.check("--out", options.out, ".png", ".html")
    elif options.log_x:
        raise ConfigError("--log-x needs --out: the terminal has a linear axis of steps")
    paths = select(options.dir, options.runs, several=True)
    # Of many runs some have not begun; one of them stops no picture of the others.
    tracked = [path for path in paths if journal_path(path).is_file()]
    if not tracked:
        raise StorageError(f"{paths[0]}: nothing was tracked (no {journal_path(paths[0])})")
    runs = {path.name: (History.read(path), Usage.read(path)) for path in tracked}
    metrics = _chosen({name for history, _ in runs.values() for name in history.metrics}, options)
    if options.out:
        _write(options, runs, metrics)
        return 0
    console = Console()
    for metric in metrics:
        found = [
            (name, *thinned(series.steps, smoothed(series.values, options.smooth), _POINTS))
            for name, (history, _) in runs.items()
            if (series := history.metrics.get(metric)) is not None
        ]
        width = min(console.width, 100)
        console.print(text_plot.draw(metric, found, width, _LINES, options.log_y))
    if count := len(paths) - len(tracked):
        text = "1 run has" if count == 1 else f"{count} runs have"
        console.print(f"{text} tracked nothing", style="dim")
    for name, (history, _) in runs.items():
        if history.restarts:
            steps = ", ".join(f"{step:,}" for step in history.restarts)
            console.print(f"{name}: later attempts begin at step {steps}", style="dim")
    return 0


def _write(options: argparse.Namespace, runs: Runs, metrics: Sequence[str]) -> None:
    # matplotlib takes a second to import.
    from hpctrain.report.views import charts, html_view
    from hpctrain.report.views.run_charts import SensorLine, metric_chart, sensor_chart, with_unit

    scales = ("log" if options.log_x else "linear"), ("log" if options.log_y else "linear")
    restarts = [step for history, _ in runs.values() for step in history.restarts]
    drawn = [
        metric_chart(
            *(
                metric,
                metric,
                {name: history.series(metric) for name, (history, _) in runs.items()},
            ),
            *(restarts, options.smooth, scales),
        )
        for metric in metrics
    ]
    sensors: dict[str, list[SensorLine]] = {}
    for name, (history, usage) in runs.items():
        for node, own in sorted(usage.nodes.items()):
            for sensor, each in own.items():
                lines = sensors.setdefault(sensor, [])
                began = min([time for time, _ in history.reported[:1]] + each.times[:1])
                label = node if len(runs) == 1 else f"{name} {node}"
                lines.append(SensorLine(label, each, began, len(lines)))
    some = [*sensors.items()][:_MOST_SYSTEM]
    drawn += [sensor_chart(key, with_unit(f"system/NODE/{key}"), lines) for key, lines in some]
    title, is_page = ", ".join(runs), options.out.suffix.lower() == ".html"
    output.write(
        options.out,
        html_view.curves_page(title, drawn) if is_page else charts.png(drawn, title),
    )
    print(options.out)


def _chosen(names: Collection[str], options: argparse.Namespace) -> list[str]:
    for name in options.metric:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"--metric {name}: {hint}there are {known}")
    chosen = [*dict.fromkeys(options.metric)] or [name for name in _FIRST if name in names]
    return chosen or sorted(names)[:4]
