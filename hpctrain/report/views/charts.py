"""The charts of a report, drawn by matplotlib: into the page as SVG, or all into one PNG.

matplotlib draws both, so a page and a picture show the same. Its SVG needs no script and no font
from elsewhere, and takes the colours of the page: they are variables of CSS, which change in the
dark. A chart of a page is as wide as a phone, so its text is never scaled down.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

_MOST_POINTS = 1200  # of a line; more are not seen
_SIZE = (4.6, 2.9)  # inches of a chart
_PER_ROW = 3  # charts of a PNG
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpctrain",
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "axes.formatter.limits": (-3, 5),
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
}


@dataclass(frozen=True)
class Colors:
    """The colours of a chart: of its series, its text and its grid."""

    series: tuple[str, ...]
    text: str
    grid: str


# Okabe and Ito, Color Universal Design (2008): told apart with all kinds of colour vision.
_OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b")
_PICTURE = Colors(_OKABE_ITO, "#1a1a1a", "#dddddd")
# These stand for variables of CSS until the SVG is written.
_PAGE = Colors(tuple(f"#ab00{n:02x}" for n in range(len(_OKABE_ITO))), "#ab00f0", "#ab00f1")
_NAMES = {color: f"var(--s{n})" for n, color in enumerate(_PAGE.series)} | {
    _PAGE.text: "var(--text)",
    _PAGE.grid: "var(--grid)",
}


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        title: What it shows.
        draw: Draws it on axes with these colours.
    """

    title: str
    draw: Callable[[Axes, Colors], None]


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element whose colours are variables of CSS."""
    with matplotlib.rc_context(_style(_PAGE)):
        figure = Figure(figsize=_SIZE)  # a layout that measures texts would take half of the time
        figure.subplots_adjust(left=0.15, right=0.97, top=0.9, bottom=0.17)
        _draw(figure.add_subplot(), chart, _PAGE)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.S)
    drawn = re.sub(r"#ab00[0-9a-f]{2}", lambda found: _NAMES[found[0]], drawn)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{_attribute(chart.title)}"', 1)


def write_png(charts: Sequence[Chart], title: str, file: Path) -> None:
    """Write all charts into one PNG.

    Raises:
        OSError: The file cannot be written.
    """
    columns = max(1, min(_PER_ROW, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    with matplotlib.rc_context(_style(_PICTURE)):
        size = (_SIZE[0] * columns, _SIZE[1] * rows + 0.4)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        figure.suptitle(_plain(title))
        for number, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, number + 1), chart, _PICTURE)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150)
    file.write_bytes(content.getvalue())


def line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, color: str) -> None:
    """Draw a line with at most so many points as are seen; the extremes of each part are kept."""
    xs, ys = _thinned(np.asarray(x, "float64"), np.asarray(y, "float64"))
    marker = "o" if len(xs) <= 30 else ""
    axes.plot(xs, ys, color=color, label=_plain(label), marker=marker, markersize=3)


def _thinned(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= _MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(y), _MOST_POINTS // 2 + 1).astype(int)
    keep = []
    for begin, end in pairwise(edges.tolist()):
        part = y[begin:end]
        keep += sorted({begin + int(part.argmin()), begin + int(part.argmax())})
    return x[keep], y[keep]


def _style(colors: Colors) -> Any:  # matplotlib's type lists the names of all settings
    named = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    return _STYLE | dict.fromkeys(named, colors.text) | {"grid.color": colors.grid}


def _draw(axes: Axes, chart: Chart, colors: Colors) -> None:
    axes.set_title(_plain(chart.title), loc="left")
    chart.draw(axes, colors)
    labels = axes.get_legend_handles_labels()[1]
    if 1 < len(labels) <= len(colors.series) or (labels and not chart.title.endswith(labels[0])):
        axes.legend(fontsize=8, loc="best")


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
