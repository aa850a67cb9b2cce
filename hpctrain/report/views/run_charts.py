"""The charts of one run: its metrics with restarts marked, and what its nodes measured."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from hpctrain.config.metric_registry import unit
from hpctrain.report.account.history import Series
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.usage import Sensor
from hpctrain.report.tree import Chart
from hpctrain.report.views.charts import line, name_axes, vertical
from hpctrain.report.views.curves import smoothed

_MOST_CHARTS, _MOST_LINES = 12, 7
_FIRST = ("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "tokens_per_s")
_LEFT_OUT = ("epoch", "gpu_hours", "samples_seen", "tokens_seen", "slowest_rank")
_STYLES = ("-", "--", ":", "-.")  # of the GPUs of a node
_SENSORS = {
    "GPU use, %": ("gpu", "utilization_percentage"),
    "GPU memory, %": ("gpu", "memory_usage_percentage"),
    "GPU power, W": ("gpu", "power_usage_watts"),
    "cores, %": ("node", "cpu_utilization_percentage"),
    "memory, MB": ("node", "system_memory_usage_megabytes"),
}


def run_charts(account: RunAccount) -> list[Chart]:
    """Return the charts of a run; a sensor or a metric that it does not have has none."""
    restarts = [span.first_step for span in account.spans[1:]]
    groups: dict[str, dict[str, Series]] = defaultdict(dict)
    for name, series in account.history.metrics.items():
        if len(series.steps) > 1 and name.rpartition("/")[2] not in _LEFT_OUT:
            groups[name.rpartition("/")[2]][name] = series
    order = [name for name in _FIRST if name in groups]
    order += sorted(name for name in groups if name not in _FIRST)
    charts = []
    for name in order[:_MOST_CHARTS]:
        first, *others = groups[name]
        charts.append(metric_chart(name if others else first, first, groups[name], restarts))
    nodes, begin = _nodes(account), account.spans[0].begin if account.spans else 0.0
    for title, (what, name) in _SENSORS.items():
        lines = [
            # GPUs share the colour of their node, unless it is the only one.
            _SensorLine(
                f"{node} {gpu}", sensor, begin, nodes.index(node), _STYLES[int(gpu[4:]) % 4]
            )
            if len(nodes) > 1
            else _SensorLine(f"{node} {gpu}", sensor, begin, int(gpu[4:]))
            for (node, gpu), sensor in account.usage.of_gpus(name).items()
        ]
        if what == "node":
            found = account.usage.of_nodes(name).items()
            lines = [_SensorLine(node, each, begin, nodes.index(node)) for node, each in found]
        if any(len(each.sensor.times) > 1 for each in lines):
            charts.append(_sensor_chart(title.partition(",")[0], title, lines))
    return charts


def _nodes(account: RunAccount) -> list[str]:
    """Return all nodes of a run; the place of a node here is its colour in every chart."""
    used = (host for span in account.spans for host in account.hosts(span))
    return sorted({*account.usage.nodes, *used})


def metric_chart(
    title: str,
    metric: str,
    series: Mapping[str, Series],
    restarts: Iterable[int],
    smooth: float = 0.0,
    scale: str = "",
) -> Chart:
    """Return the chart of a metric over the steps, with its lines by name, and the restarts marked.

    With `smooth`, the weight of the average, the values themselves are drawn faintly. The
    axis of values has the `scale`, or the one that suits the metric.
    """

    def draw(axes: Axes) -> None:
        every = [value for each in series.values() for value in each.finite()]
        falls = metric.rpartition("/")[2] in ("loss", "grad_norm") and min(every, default=0) > 0
        axes.set(yscale=scale or ("log" if falls else "linear"))
        for number, (name, each) in enumerate(series.items()):
            if smooth:
                axes.plot(each.steps, each.values, color=f"C{number}", alpha=0.25, linewidth=0.8)
            line(axes, each.steps, smoothed(each.values, smooth), name, number)
        for number, step in enumerate(restarts):
            label = "restart" if number == 0 else ""
            vertical(axes, step, label)
        name_axes(axes, "step", _with_unit(metric), metric, every)

    return Chart(title, draw)


def _with_unit(metric: str) -> str:
    """Return the name of an axis: `step p50, ms` for `perf/step_ms_p50`."""
    name, known = metric.rpartition("/")[2], unit(re.sub(r"gpu_\d+", "gpu_N", metric))
    if "/" in known:  # the unit says it all: samples/s
        return known
    units = "ms|s|gib|percent|percentage|megabytes|watts|joules|celsius|megahertz"
    name = re.sub(rf"_({units})(?=_|$)", "", name) if known else name
    return name.replace("_", " ") + (f", {known}" if known else "")


class _SensorLine(NamedTuple):
    """A sensor in a chart, its first second there, and its colour and how it is dashed."""

    label: str
    sensor: Sensor
    begin: float
    number: int
    style: str = ""


def _sensor_chart(title: str, what: str, lines: Sequence[_SensorLine]) -> Chart:
    """Return the chart of a sensor over the time; `what` names it, with its unit."""
    # Of many GPUs the outer ones tell most: the least and the most used.
    ordered = sorted(lines, key=lambda each: each.sensor.mean() or 0.0)
    shown = ordered if len(ordered) <= _MOST_LINES else ordered[:3] + ordered[-3:]
    long = max(each.sensor.times[-1] - each.begin for each in lines) > 7200
    seconds, name = (3600.0, "hours") if long else (60.0, "minutes")

    def draw(axes: Axes) -> None:
        for label, sensor, begin, number, style in sorted(shown, key=lambda each: each.label):
            times, values = sensor.with_gaps()
            since = [(time - begin) / seconds for time in times]
            line(axes, since, values, label, number, style)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a level line does not lie on the edge
        kind = "percent" if what.endswith("%") else ""
        every = [value for each in shown for value in each.sensor.values]
        name_axes(axes, f"{name} since the start", what, kind, every)

    more = f" ({len(shown)} of {len(lines)})" if len(shown) < len(lines) else ""
    return Chart(title + more, draw)
