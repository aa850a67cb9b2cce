"""The charts of a report, drawn by matplotlib: into the page as SVG, or all into one PNG.

matplotlib draws both, so a page and a picture show the same. Its SVG needs no script and no font
from elsewhere, and takes the colours of the page: they are variables of CSS, which change in the
dark. A chart of a page is as wide as a phone, so its text is never scaled down.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from numpy.typing import ArrayLike

from hpctrain.config.metric_registry import unit
from hpctrain.metric_names import better
from hpctrain.report.account.history import Series
from hpctrain.report.tree import Chart
from hpctrain.report.views.curves import thinned

_MOST_POINTS = 1200  # of a line; more are not seen
_SIZE = (4.6, 2.9)  # inches of a chart
_MOST_MARKED = 30  # points of a line that are marked each
_SOLID = 4  # lines of a chart; the others are dashed
_PER_ROW = 3  # charts of a PNG
# Okabe and Ito, Color Universal Design (2008): told apart with all kinds of colour vision.
_OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")
# These stand for variables of CSS until the SVG is written.
_NAMES = {f"#ab00{n:02x}": f"var(--s{n})" for n in range(len(_OKABE_ITO))}
_SERIES = tuple(_NAMES)
_NAMES |= {"#ab00f0": "var(--text)", "#ab00f1": "var(--grid)", "#ab00f2": "var(--card)"}


def _style(series: Sequence[str], text: str, grid: str, back: str) -> Any:
    """Return the settings of matplotlib with these colours; the series are its C0, C1, ..."""
    # matplotlib's type lists the names of all settings, so it is not written here.
    named = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    return dict.fromkeys(named, text) | {
        "axes.prop_cycle": cycler(color=series),
        "grid.color": grid,
        "legend.facecolor": back,
        "svg.fonttype": "none",
        "svg.hashsalt": "hpctrain",
        "font.size": 9,
        "font.family": "sans-serif",
        "axes.formatter.useoffset": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.4,
        "legend.framealpha": 0.8,
        "legend.edgecolor": "none",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
    }


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element whose colours are variables of CSS."""
    with matplotlib.rc_context(_style(_SERIES, "#ab00f0", "#ab00f1", "#ab00f2")):
        figure = Figure(figsize=_SIZE)  # a layout that measures texts would take half of the time
        _draw(figure.add_subplot(), chart)
        figure.subplots_adjust(left=0.18, right=0.97, top=0.9, bottom=0.17)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.S)
    drawn = re.sub(r"#ab00[0-9a-f]{2}", lambda found: _NAMES[found[0]], drawn)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1)


def png(charts: Sequence[Chart], title: str) -> bytes:
    """Return all charts as one PNG."""
    columns = max(1, min(_PER_ROW, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    with matplotlib.rc_context(_style(_OKABE_ITO, "#1a1a1a", "#dddddd", "#ffffff")):
        size = (_SIZE[0] * columns, _SIZE[1] * rows + 0.4)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        figure.suptitle(_plain(title))
        for number, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, number + 1), chart)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def line(axes: Axes, x: ArrayLike, y: ArrayLike, label: str, number: int) -> None:
    """Draw the line with this number in its chart, with at most so many points as are seen.

    A value that is not finite leaves a gap. Lines are dashed from the fifth on: they are told apart
    where colours are not.
    """
    xs, ys = thinned(x, y, _MOST_POINTS)
    known = np.concatenate(([False], np.isfinite(ys), [False]))
    alone = known[1:-1] & ~known[:-2] & ~known[2:]  # no line reaches them
    marked = np.flatnonzero(alone if len(xs) > _MOST_MARKED else known[1:-1]).tolist()
    style = "-" if number < _SOLID else "--"
    (drawn,) = axes.plot(xs, ys, style, color=f"C{number % 10}", label=_plain(label))
    if marked:
        drawn.set(marker="o", markevery=marked, markersize=3)


def vertical(axes: Axes, x: float, label: str = "") -> None:
    """Draw a dotted line at a step."""
    axes.axvline(x, color=rcParams["text.color"], linestyle=":", linewidth=0.8, label=label)


def name_axes(axes: Axes, x: str, metric: str) -> None:
    """Name both axes of a chart of a metric."""
    direction = better(metric)
    known = (unit(metric), f"{direction} is better" if direction else "")
    more = ", ".join(filter(None, known))
    axes.set_xlabel(_plain(x))
    axes.set_ylabel(_plain(metric + (f" ({more})" if more else "")))


def metric_chart(
    metric: str,
    series: Mapping[str, Series],
    restarts: Iterable[int],
) -> Chart:
    """Return the chart of a metric over the steps, with its lines by name, and the restarts marked.

    The axis of values has the scale that suits the metric.
    """

    def draw(axes: Axes) -> None:
        every = [value for each in series.values() for value in each.finite()]
        falls = metric.rpartition("/")[2] in ("loss", "grad_norm") and min(every, default=0) > 0
        axes.set(yscale="log" if falls else "linear")
        for number, (name, each) in enumerate(series.items()):
            line(axes, each.steps, each.values, name, number)
        for number, step in enumerate(restarts):
            vertical(axes, step, "restart" if number == 0 else "")
        name_axes(axes, "step", metric)

    return Chart(metric, draw)


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(_plain(chart.title), loc="left")
    chart.draw(axes)
    for axis in (axes.xaxis, axes.yaxis):
        if isinstance(formatter := axis.get_major_formatter(), ScalarFormatter):
            formatter.set_scientific(False)  # no factor above the axis
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, loc="best")


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
