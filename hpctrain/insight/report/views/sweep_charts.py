"""The charts of several runs: their curves, and scaling."""

from dataclasses import replace

from matplotlib.axes import Axes

from hpctrain.insight.report.sweeps.parameters import SweptRuns, label
from hpctrain.insight.report.sweeps.scaling import Scaling
from hpctrain.insight.report.tree import Chart
from hpctrain.insight.report.views.charts import line, metric_chart

_MOST_LINES = 7
_LONGEST = 40  # characters in a legend


def sweep_chart(sweep: SweptRuns) -> Chart:
    """Return the curves of the best runs of a sweep."""
    series = {}
    for account in sweep.finished[:_MOST_LINES]:
        told = label({key: account.swept.get(key, "") for key in sweep.keys})
        name = told if 0 < len(told) <= _LONGEST else account.name
        series[name] = account.history.series(sweep.metric)
    return replace(metric_chart(sweep.metric, series, []), title=f"best runs: {sweep.metric}")


def scaling_chart(series: Scaling) -> Chart:
    """Return the speed-up of a series beside the ideal one."""
    ranks = [point.ranks for point in series.points]

    def draw(axes: Axes) -> None:
        axes.plot(ranks, [series.speedup(point) for point in series.points], "o", label="measured")
        line(axes, ranks, [each / ranks[0] for each in ranks], "ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_ylabel("speed-up")

    return Chart("speed-up", draw)
