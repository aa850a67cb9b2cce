"""The charts of a report, drawn by matplotlib: into the page as SVG, or all into one PNG.

matplotlib draws both, so a page and a picture show the same. Its SVG needs no script and no font
from elsewhere, and takes the colours of the page: they are variables of CSS, which change in the
dark. A chart of a page is as wide as a phone, so its text is never scaled down.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, ScalarFormatter
from numpy.typing import ArrayLike

from hpctrain.metric_names import most
from hpctrain.report.tree import Chart
from hpctrain.report.views.curves import thinned

_MOST_POINTS = 1200  # of a line; more are not seen
_SIZE = (4.6, 2.9)  # inches of a chart
_MOST_MARKED = 30  # points of a line that are marked each
_SOLID = 4  # lines of a chart; the others are dashed
_PER_ROW = 3  # charts of a PNG
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpctrain",
    "font.size": 9,
    "font.family": "sans-serif",
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


def _style(series: Sequence[str], text: str, grid: str, back: str) -> Any:
    """Return the settings of matplotlib with these colours; the series are its C0, C1, ..."""
    # matplotlib's type lists the names of all settings, so it is not written here.
    named = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    more = {"grid.color": grid, "legend.facecolor": back}
    return _STYLE | dict.fromkeys(named, text) | more | {"axes.prop_cycle": cycler(color=series)}


# Okabe and Ito, Color Universal Design (2008): told apart with all kinds of colour vision.
_OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")
_PICTURE = _style(_OKABE_ITO, "#1a1a1a", "#dddddd", "#ffffff")
# These stand for variables of CSS until the SVG is written.
_SERIES = [f"#ab00{n:02x}" for n in range(len(_OKABE_ITO))]
_PAGE = _style(_SERIES, "#ab00f0", "#ab00f1", "#ab00f2")
_NAMES = {color: f"var(--s{n})" for n, color in enumerate(_SERIES)}
_NAMES |= {"#ab00f0": "var(--text)", "#ab00f1": "var(--grid)", "#ab00f2": "var(--card)"}


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element whose colours are variables of CSS."""
    with matplotlib.rc_context(_PAGE):
        figure = Figure(figsize=_SIZE)  # a layout that measures texts would take half of the time
        axes = figure.add_subplot()
        _draw(axes, chart)
        wide = max([len(axes.yaxis.get_major_formatter()(y)) for y in axes.get_yticks()], default=0)
        left = max(0.18, 0.075 + 0.0165 * wide)
        figure.subplots_adjust(left=left, right=0.97, top=0.9, bottom=0.17)
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
    with matplotlib.rc_context(_PICTURE):
        size = (_SIZE[0] * columns, _SIZE[1] * rows + 0.4)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        figure.suptitle(_plain(title))
        for number, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, number + 1), chart)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def line(axes: Axes, x: ArrayLike, y: ArrayLike, label: str, number: int, style: str = "") -> None:
    """Draw the line with this number in its chart, with at most so many points as are seen.

    A value that is not finite leaves a gap. Without a `style`, lines are dashed from the fifth on:
    they are told apart where colours are not.
    """
    xs, ys = thinned(x, y, _MOST_POINTS)
    known = np.concatenate(([False], np.isfinite(ys), [False]))
    alone = known[1:-1] & ~known[:-2] & ~known[2:]  # no line reaches them
    marked = np.flatnonzero(alone if len(xs) > _MOST_MARKED else known[1:-1]).tolist()
    style = style or ("-" if number < _SOLID else "--")
    (drawn,) = axes.plot(xs, ys, style, color=f"C{number}", label=_plain(label))
    if marked:
        drawn.set(marker="o", markevery=marked, markersize=3)


def vertical(axes: Axes, x: float, label: str = "") -> None:
    """Draw a dotted line at a step."""
    axes.axvline(x, color=rcParams["text.color"], linestyle=":", linewidth=0.8, label=label)


def name_axes(axes: Axes, x: str, y: str, metric: str, values: Iterable[float]) -> None:
    """Name both axes of a drawn chart, and keep the values within what their metric can be."""
    axes.set_xlabel(_plain(x))
    axes.set_ylabel(_plain(y))
    finite = [value for value in values if math.isfinite(value)]
    low, high = axes.get_ylim()
    if finite and axes.get_yscale() == "linear":
        low = max(low, 0.0) if min(finite) >= 0 else low
        high = min(high, most(metric, max(finite)))
        if low < high:
            axes.set_ylim(low, high)


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(_plain(chart.title), loc="left")
    chart.draw(axes)
    _plain_numbers(axes)
    handles, labels = axes.get_legend_handles_labels()
    # The title says what a line is whose name it has.
    named = {
        label: handle
        for label, handle in zip(labels, handles, strict=True)
        if not _plain(chart.title).endswith(label)
    }
    if len(named) < len(labels) - 1:
        named = dict(zip(labels, handles, strict=True))
    if named:
        columns = 1 + (len(named) - 1) // 10
        axes.legend([*named.values()], [*named], fontsize=8, loc="best", ncols=columns)


class _LogTicks(LogFormatter):
    """Labels those ticks of an axis that matplotlib chooses, with plain numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return _number(x) if super().__call__(x, pos) else ""


def _plain_numbers(axes: Axes) -> None:
    """Let an axis of numbers show 0.002 and 12,000, and no factor above it."""
    for scale, axis in ((axes.get_xscale(), axes.xaxis), (axes.get_yscale(), axes.yaxis)):
        if scale == "log":
            axis.set_major_formatter(_LogTicks(labelOnlyBase=False))
            axis.set_minor_formatter(_LogTicks(labelOnlyBase=False))
        elif isinstance(axis.get_major_formatter(), ScalarFormatter):
            places, digits = axis.get_majorticklocs(), 4
            while digits < 12 and len({_number(x, digits) for x in places}) < len(places):
                digits += 1  # neighbours have different labels: 0.002999 and 0.0029995
            axis.set_major_formatter(FuncFormatter(lambda x, _, digits=digits: _number(x, digits)))


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 and digits == 4 else f"{value:.{digits}g}"


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
