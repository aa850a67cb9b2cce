"""`python -m hpctrain report --plot RUN...`: draw the curves of runs from their journals.

run directories ── journal ── curves ──┬── text in the terminal
                                       └── --out FILE.png
"""

import argparse
import difflib
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from rich.text import Text

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.terminal.console import Console
from hpctrain.base.terminal.terminal import printable
from hpctrain.commands.select import add_dir, select
from hpctrain.insight.report.account.history import History, Series
from hpctrain.insight.report.report_command import check_file, write_file
from hpctrain.tracking.journal import journal_path

_FIRST = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")
_LINES = 10
_COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
_MARKS = "•+x*o#%"  # a file has no colours; as many as make other pairs with the colours
_MARGIN = 11  # characters of the scale


def main(argv: list[str]) -> int:
    """Draw the runs in `argv`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain report --plot",
        description="Draw the curves of runs in the terminal, or with --out as a file.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="directories, names, or their starts"
    )
    add_dir(parser)
    parser.add_argument("--metric", action="append", default=[], metavar="KEY", help="repeatable")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a .png file")
    options = parser.parse_args(argv)
    if options.out:
        check_file("--out", options.out, ".png")
    paths = select(options.dir, options.runs, several=True)
    # Of many runs some have not begun; one of them stops no picture of the others.
    tracked = [path for path in paths if journal_path(path).is_file()]
    if not tracked:
        raise StorageError(f"{paths[0]}: nothing was tracked (no {journal_path(paths[0])})")
    runs = {path.name: History.read(path) for path in tracked}
    metrics = _chosen({name for history in runs.values() for name in history.metrics}, options)
    curves = {metric: {name: runs[name].series(metric) for name in runs} for metric in metrics}
    if options.out:
        from hpctrain.insight.report.views import charts  # matplotlib takes a second to import

        restarts = [step for history in runs.values() for step in history.restarts]
        drawn = [charts.metric_chart(metric, lines, restarts) for metric, lines in curves.items()]
        write_file(options.out, charts.png(drawn, ", ".join(runs)))
        print(options.out)
        return 0
    console = Console()
    for metric, lines in curves.items():
        console.print(_draw(metric, lines, min(console.width, 100) - _MARGIN))
    if count := len(paths) - len(tracked):
        text = "1 run has" if count == 1 else f"{count} runs have"
        console.print(f"{text} tracked nothing", style="dim")
    return 0


def _chosen(names: Collection[str], options: argparse.Namespace) -> list[str]:
    for name in options.metric:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"--metric {name}: {hint}there are {known}")
    chosen = [*dict.fromkeys(options.metric)] or [name for name in _FIRST if name in names]
    return chosen or sorted(names)[:4]


def _draw(title: str, curves: Mapping[str, Series], width: int) -> Text:
    """Return the plot of a metric, with the highest and the lowest value of each column."""
    points = [
        (x, y, number)
        for number, each in enumerate(curves.values())
        for x, y in zip(*each.thinned(2 * width), strict=True)
        if math.isfinite(y)
    ]
    text = Text(printable(title), "bold")
    if not points:
        return text.append("\n  no value that can be drawn\n", "dim")
    xs, ys, _ = zip(*points, strict=True)
    (low_x, high_x), (low, high) = (min(xs), max(xs)), (min(ys), max(ys))
    dots: dict[tuple[int, int], int] = {}
    for x, y, number in points:
        column = round((x - low_x) / ((high_x - low_x) or 1) * (width - 1))
        dots[round((high - y) / ((high - low) or 1) * (_LINES - 1)), column] = number
    for row in range(_LINES):
        value = high - (high - low) * row / (_LINES - 1)
        value = 0.0 if abs(value) < 1e-9 * (high - low) else value  # not 1.11e-16
        labelled = row in (0, _LINES // 2, _LINES - 1)
        text.append(f"\n{value:>9.4g} ┤" if labelled else f"\n{'':>9} │", "dim")
        for column in range(width):
            number = dots.get((row, column), -1)
            text.append(*((" ", "") if number < 0 else _mark(number)))
    text.append(f"\n{'':>9} └{low_x:<g}{high_x:>{width - len(f'{low_x:g}')}g}\n", "dim")
    if len(curves) > 1:
        for number, name in enumerate(curves):
            mark, colour = _mark(number)
            text.append(f"{'':>11}{mark} {printable(name)}\n", colour)
    return text


def _mark(number: int) -> tuple[str, str]:
    """Return the character and the colour of a curve."""
    return _MARKS[number % len(_MARKS)], _COLOURS[number % len(_COLOURS)]
