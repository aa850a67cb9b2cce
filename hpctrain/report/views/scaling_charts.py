"""The chart of a scaling series: measured speed-up, the ideal line, and the fit."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from hpctrain.report.sweeps.scaling_fit import Scaling
from hpctrain.report.views.charts import Chart, Colors, line


def scaling_charts(series: Scaling) -> list[Chart]:
    """Return the charts of a series; none with less than two points."""
    if len(series.points) < 2:
        return []
    return [
        Chart("speed-up", lambda axes, colors: _speedup(series, axes, colors)),
        Chart("efficiency", lambda axes, colors: _efficiency(series, axes, colors)),
    ]


def _speedup(series: Scaling, axes: Axes, colors: Colors) -> None:
    ranks = [point.ranks for point in series.points]
    first, most = ranks[0], 8 * ranks[-1]
    xs = np.geomspace(first, most, 50).tolist()
    axes.plot(ranks, [series.speedup(point) for point in series.points], "o", label="measured")
    axes.lines[-1].set_color(colors.series[0])
    line(axes, xs, [x / first for x in xs], "ideal", colors, 6)
    line(axes, xs, [series.predicted(x / first)[0] for x in xs], "fit", colors, 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"times the speed of {first} rank{'s' * (first > 1)}")


def _efficiency(series: Scaling, axes: Axes, colors: Colors) -> None:
    ranks = [point.ranks for point in series.points]
    axes.bar(
        [str(each) for each in ranks],
        [100 * series.efficiency(point) for point in series.points],
        color=colors.series[0],
    )
    axes.axhline(95, color=colors.series[2], linestyle=":", label="good")
    axes.axhline(81, color=colors.series[4], linestyle=":", label="acceptable")
    axes.set_ylim(0, 110)
    axes.set_xlabel("ranks")
    axes.set_ylabel("% of an ideal speed-up")
