"""`python -m hpctrain report --plot RUN...`: draw the curves of runs from their journals.

run directories ── journal ── curves ──┬── text in the terminal
                                       └── --out FILE.png or FILE.html
"""

import argparse
import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from hpctrain.console import Console
from hpctrain.errors import ConfigError, StorageError
from hpctrain.report.account.history import History
from hpctrain.report.tree import Curves
from hpctrain.report.views import output
from hpctrain.report.views.curves import Numbers, thinned
from hpctrain.runs.state.select import add_dir, select
from hpctrain.terminal import printable
from hpctrain.tracking.journal import journal_path

_FIRST = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")
_LINES, _POINTS = 10, 1000
_COLOURS = ("cyan", "yellow", "magenta", "green", "red", "blue")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MARGIN = 11  # characters of the scale
Runs = Mapping[str, History]


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
    parser.add_argument("--out", type=Path, metavar="FILE", help="a .png or .html file")
    options = parser.parse_args(argv)
    if options.out:
        output.check("--out", options.out, ".png", ".html")
    paths = select(options.dir, options.runs, several=True)
    # Of many runs some have not begun; one of them stops no picture of the others.
    tracked = [path for path in paths if journal_path(path).is_file()]
    if not tracked:
        raise StorageError(f"{paths[0]}: nothing was tracked (no {journal_path(paths[0])})")
    runs = {path.name: History.read(path) for path in tracked}
    metrics = _chosen({name for history in runs.values() for name in history.metrics}, options)
    if options.out:
        _write(options, runs, metrics)
        return 0
    console = Console()
    for metric in metrics:
        found = [
            (name, *thinned(series.steps, series.values, _POINTS))
            for name, history in runs.items()
            if (series := history.metrics.get(metric)) is not None
        ]
        width = min(console.width, 100)
        console.print(_draw(metric, found, width))
    if count := len(paths) - len(tracked):
        text = "1 run has" if count == 1 else f"{count} runs have"
        console.print(f"{text} tracked nothing", style="dim")
    for name, history in runs.items():
        if history.restarts:
            steps = ", ".join(f"{step:,}" for step in history.restarts)
            console.print(f"{name}: later attempts begin at step {steps}", style="dim")
    return 0


def _write(options: argparse.Namespace, runs: Runs, metrics: Sequence[str]) -> None:
    # matplotlib takes a second to import.
    from hpctrain.report.views import charts, html_view

    restarts = [step for history in runs.values() for step in history.restarts]
    drawn = []
    for metric in metrics:
        lines = {name: history.series(metric) for name, history in runs.items()}
        drawn.append(charts.metric_chart(metric, lines, restarts))
    title, is_page = ", ".join(runs), options.out.suffix.lower() == ".html"
    page = html_view.page(title, [Curves(drawn)]) if is_page else charts.png(drawn, title)
    output.write(options.out, page)
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


def _draw(title: str, curves: Sequence[tuple[str, Numbers, Numbers]], width: int) -> Text:
    """Return the plot of curves (name, steps, values): each character has 2 x 4 dots of braille."""
    points = [
        (x, y, number)
        for number, (_, xs, ys) in enumerate(curves)
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
        if math.isfinite(y)
    ]
    text = Text(printable(title), "bold")
    if not points:
        return text.append("\n  no value that can be drawn\n", "dim")
    low_x, high_x = min(p[0] for p in points), max(p[0] for p in points)
    low, high = min(p[1] for p in points), max(p[1] for p in points)
    across, down = 2 * (width - _MARGIN) - 1, 4 * _LINES - 1
    dots: dict[tuple[int, int], tuple[int, int]] = {}
    before: tuple[int, int, int] | None = None
    for x, y, number in points:
        column = round((x - low_x) / ((high_x - low_x) or 1) * across)
        row = down - round((y - low) / ((high - low) or 1) * down)
        start = before if before is not None and before[2] == number else (column, row, number)
        for at_column, at_row in _line(start[:2], (column, row)):
            place = at_row // 4, at_column // 2
            dots[place] = dots.get(place, (0, 0))[0] | _DOTS[at_row % 4][at_column % 2], number
        before = column, row, number
    for row in range(_LINES):
        value = high - (high - low) * row / (_LINES - 1)
        value = 0.0 if abs(value) < 1e-9 * (high - low) else value  # not 1.11e-16
        labelled = row in (0, _LINES // 2, _LINES - 1)
        text.append(f"\n{value:>9.4g} ┤" if labelled else f"\n{'':>9} │", "dim")
        for column in range(width - _MARGIN):
            mask, number = dots.get((row, column), (0, 0))
            text.append(chr(0x2800 + mask) if mask else " ", _COLOURS[number % len(_COLOURS)])
    scale = f"{low_x:g}"
    text.append(f"\n{'':>9} └{scale}{high_x:>{max(1, width - _MARGIN - len(scale))}g}\n", "dim")
    if len(curves) > 1:
        for number, (name, _, _) in enumerate(curves):
            text.append(f"{'':>11}━ {printable(name)}\n", _COLOURS[number % len(_COLOURS)])
    return text


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the dots (column, row) of a straight line, with both of its ends."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for part in range(length + 1):
        yield (
            round(start[0] + (end[0] - start[0]) * part / length),
            round(start[1] + (end[1] - start[1]) * part / length),
        )
