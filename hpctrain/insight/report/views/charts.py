"""The charts of runs and sweeps, drawn by matplotlib: into the page as SVG, or all into one PNG.

The SVG needs no script and no font from elsewhere. A chart of a page is as wide as a phone, so its
text is never scaled down.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpctrain.base.names.metric_names import better
from hpctrain.config.metric_registry import unit
from hpctrain.insight.report.account.history import Series
from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.insight.report.sweeps.parameters import SweptRuns, label
from hpctrain.insight.report.sweeps.scaling import Scaling
from hpctrain.insight.report.tree import Chart

_MOST_POINTS = 1200  # of a line; more are not seen
_SIZE = (4.6, 2.9)  # inches of a chart
_MOST_MARKED = 30  # points of a line that are marked each
_PER_ROW = 3  # charts of a PNG
# Of a run: so many charts, these first, those of other metrics by name.
_MOST_CHARTS = 12
_FIRST = ("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "tokens_per_s")
_LEFT_OUT = ("epoch", "gpu_hours", "samples_seen", "tokens_seen", "evaluation_s")
_MOST_LINES, _LONGEST = 7, 40  # of a sweep: lines, and characters of their names in the legend
_STYLE = Path(__file__).with_name("charts.mplstyle")


def svg(chart: Chart) -> str:
    """Return a chart as an SVG element."""
    with matplotlib.rc_context(fname=_STYLE):
        figure = Figure(figsize=_SIZE)  # a layout that measures texts would take half of the time
        _draw(figure.add_subplot(), chart)
        figure.subplots_adjust(left=0.18, right=0.97, top=0.9, bottom=0.17)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.S)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1)


def png(charts: Sequence[Chart], title: str) -> bytes:
    """Return all charts as one PNG."""
    columns = max(1, min(_PER_ROW, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    with matplotlib.rc_context(fname=_STYLE):
        figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * rows + 0.4), layout="constrained")
        figure.suptitle(_plain(title))
        for number, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, number + 1), chart)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


def _line(axes: Axes, series: Series, label: str) -> None:
    """Draw a line with at most so many points as are seen; values that are not finite are gaps."""
    xs, ys = series.thinned(_MOST_POINTS)
    marker = "o" if len(xs) <= _MOST_MARKED else None
    axes.plot(xs, ys, marker=marker, markersize=3, label=_plain(label))


def metric_chart(
    metric: str, series: Mapping[str, Series], restarts: Iterable[int], title: str = ""
) -> Chart:
    """Return the chart of a metric over the steps, with its lines by name, and the restarts marked.

    The axis of values has the scale that suits the metric. The title has its name, and that of a
    line that is alone.
    """

    def draw(axes: Axes) -> None:
        every = [value for each in series.values() for value in each.finite()]
        falls = metric.rpartition("/")[2] in ("loss", "grad_norm") and min(every, default=0) > 0
        axes.set(yscale="log" if falls else "linear")
        for name, each in series.items():
            _line(axes, each, name if len(series) > 1 else "")
        for number, step in enumerate(restarts):
            label = "" if number else "restart"
            axes.axvline(step, color="black", linestyle=":", linewidth=0.8, label=label)
        direction = better(metric)
        known = (unit(metric), f"{direction} is better" if direction else "")
        axes.set_xlabel("step")
        axes.set_ylabel(", ".join(filter(None, known)))

    return Chart(title or metric, draw)


def run_charts(account: RunAccount) -> list[Chart]:
    """Return the charts of a run; a metric that it does not have has none."""
    restarts = [span.first_step for span in account.spans[1:]]
    names = [
        name
        for name, series in account.history.metrics.items()
        if len(series.steps) > 1 and not name.startswith("best/")  # the curve itself shows it
    ]
    groups = dict.fromkeys(name.rpartition("/")[2] for name in names)
    order = [name for name in _FIRST if name in groups]
    order += sorted(name for name in groups if name not in (*_FIRST, *_LEFT_OUT))
    charts = []
    for name in order[:_MOST_CHARTS]:
        series = {n: account.history.series(n) for n in names if n.rpartition("/")[2] == name}
        title = name if len(series) > 1 else ""
        charts.append(metric_chart(next(iter(series)), series, restarts, title))
    return charts


def sweep_chart(sweep: SweptRuns) -> Chart:
    """Return the curves of the best runs of a sweep."""
    series = {}
    for account in sweep.finished[:_MOST_LINES]:
        told = label({key: account.swept.get(key, "") for key in sweep.keys})
        name = told if 0 < len(told) <= _LONGEST else account.name
        series[name] = account.history.series(sweep.metric)
    return metric_chart(sweep.metric, series, [], f"best runs: {sweep.metric}")


def scaling_chart(series: Scaling) -> Chart:
    """Return the speed-up of a series beside the ideal one."""
    ranks = [point.ranks for point in series.points]

    def draw(axes: Axes) -> None:
        axes.plot(ranks, [series.speedup(point) for point in series.points], "o", label="measured")
        axes.plot(ranks, [each / ranks[0] for each in ranks], "o-", markersize=3, label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_ylabel("speed-up")

    return Chart("speed-up", draw)


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(_plain(chart.title), loc="left")
    chart.draw(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, loc="best")


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
