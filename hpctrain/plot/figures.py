"""The curves of runs as charts, for a picture or a page: those of `report`, of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from hpctrain.report.account.history import History
from hpctrain.report.account.usage import Sensor, Usage
from hpctrain.report.views.charts import Chart, Colors, line, name_axes
from hpctrain.report.views.curves import smoothed
from hpctrain.report.views.run_charts import with_unit

_MOST_SYSTEM = 12
Runs = Mapping[str, tuple[History, Usage]]


def figures(
    runs: Runs, metrics: Sequence[str], smooth: float, *, log_x: bool, log_y: bool
) -> list[Chart]:
    """Return the charts of runs: one for each metric, then what the nodes have measured.

    Args:
        runs: The journal and the sensors of each run, by its name.
        metrics: The metrics over the steps.
        smooth: The weight of the average; then the values themselves are drawn faintly.
        log_x: Whether the steps have a logarithmic axis.
        log_y: Whether the metrics have one.
    """
    scales = ("log" if log_x else "linear"), ("log" if log_y else "linear")
    usages = [usage.nodes for _, usage in runs.values()]
    sensors = [(node, name) for nodes in usages for node in nodes for name in nodes[node]]
    return [
        *(_metric(runs, name, smooth, scales) for name in metrics),
        *(_sensor(runs, node, name) for node, name in [*dict.fromkeys(sensors)][:_MOST_SYSTEM]),
    ]


def _metric(runs: Runs, name: str, smooth: float, scales: tuple[str, str]) -> Chart:
    def draw(axes: Axes, colors: Colors) -> None:
        axes.set(xscale=scales[0], yscale=scales[1])
        every = []
        for number, (run, (history, _)) in enumerate(runs.items()):
            series, color = history.series(name), colors.series[number % len(colors.series)]
            every += series.finite()
            if smooth:
                axes.plot(series.steps, series.values, color=color, alpha=0.25, linewidth=0.8)
            line(axes, series.steps, smoothed(series.values, smooth), run, colors, number)
            for step in history.restarts:
                axes.axvline(step, color=color, linestyle=":", linewidth=0.8)
        name_axes(axes, "step", with_unit(name), name, every)

    return Chart(name, draw)


def _sensor(runs: Runs, node: str, name: str) -> Chart:
    def draw(axes: Axes, colors: Colors) -> None:
        every: list[float] = []
        for number, (run, (history, usage)) in enumerate(runs.items()):
            sensor = usage.nodes.get(node, {}).get(name, Sensor())
            times, values = sensor.with_gaps()
            began = min([time for time, _ in history.reported[:1]] + times[:1], default=0.0)
            # A node has one colour in all charts; several runs have one each.
            color = number if len(runs) > 1 else sorted(usage.nodes).index(node)
            line(axes, [(time - began) / 3600 for time in times], values, run, colors, color)
            every += values
        name_axes(axes, "hours since the start", name.replace("_", " "), name, every)

    return Chart(f"system/{node}/{name}", draw)
