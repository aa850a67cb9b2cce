"""The charts of one run: its metrics with restarts marked, and what its nodes measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from hpctrain.config.metric_registry import unit
from hpctrain.report.account.history import Series
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.slow_hosts import SlowHost, slow_hosts
from hpctrain.report.account.usage import Sensor
from hpctrain.report.views.charts import Chart, Colors, line, name_axes, name_rows

_MOST_CHARTS, _MOST_LINES, _MOST_HOSTS = 12, 7, 8
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
    charts = [_metric(name, groups[name], restarts) for name in order[:_MOST_CHARTS]]
    for title, (what, name) in _SENSORS.items():
        usage = account.usage
        found: dict[str, Sensor] = (
            {f"{node} {gpu}": sensor for (node, gpu), sensor in usage.of_gpus(name).items()}
            if what == "gpu"
            else usage.of_nodes(name)
        )
        if any(len(sensor.times) > 1 for sensor in found.values()):
            charts.append(_sensors(title, found, account))
    if hosts := slow_hosts(account):
        charts.append(_slow_hosts(hosts, _nodes(account)))
    return charts


def _nodes(account: RunAccount) -> list[str]:
    """Return all nodes of a run; the place of a node here is its colour in every chart."""
    used = (host for span in account.spans for host in account.hosts(span))
    return sorted({*account.usage.nodes, *used})


def _slow_hosts(hosts: Sequence[SlowHost], nodes: Sequence[str]) -> Chart:
    shown = hosts[:_MOST_HOSTS][::-1]

    def draw(axes: Axes, colors: Colors) -> None:
        places = range(len(shown))
        values = [100 * each.slowest for each in shown]
        axes.barh(
            [place + 0.12 for place in places],
            values,
            0.24,
            color=[colors.series[nodes.index(each.host) % len(colors.series)] for each in shown],
        )
        if any(each.throttled is not None for each in shown):
            axes.barh(
                [place - 0.12 for place in places],
                [100 * (each.throttled or 0.0) for each in shown],
                0.24,
                color=colors.text,
                label="% of samples with a GPU too hot",
            )
        fair = 100 / len(hosts)
        axes.axvline(fair, color=colors.text, linestyle=":", label="if all are alike")
        name_rows(axes, [each.host for each in shown])
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of reports in which the slowest rank was here")

    more = f" (the first {len(shown)} of {len(hosts)})" if len(shown) < len(hosts) else ""
    return Chart(f"slow hosts{more}", draw)


def _metric(title: str, series: Mapping[str, Series], restarts: Sequence[int]) -> Chart:
    def draw(axes: Axes, colors: Colors) -> None:
        for number, (name, each) in enumerate(list(series.items())[:_MOST_LINES]):
            line(axes, each.steps, each.values, name, colors, number)
        for number, step in enumerate(restarts):
            label = "restart" if number == 0 else ""
            axes.axvline(step, color=colors.text, linestyle=":", linewidth=0.8, label=label)
        every = [value for each in series.values() for value in each.finite()]
        if title in ("loss", "grad_norm") and every and min(every) > 0 < max(every):
            axes.set_yscale("log")
        name_axes(axes, "step", with_unit(names[0]), title, every)

    names = list(series)
    return Chart(names[0] if len(names) == 1 else title, draw)


def with_unit(metric: str) -> str:
    """Return the name of an axis: `step p50, ms` for `perf/step_ms_p50`."""
    name, known = metric.rpartition("/")[2], unit(metric)
    if "/" in known:  # the unit says it all: samples/s
        return known
    name = re.sub(r"_(ms|s|gib|percent)(?=_|$)", "", name) if known else name
    return name.replace("_", " ") + (f", {known}" if known else "")


def _sensors(title: str, sensors: Mapping[str, Sensor], account: RunAccount) -> Chart:
    begin = account.spans[0].begin if account.spans else 0.0
    last = max(sensor.times[-1] for sensor in sensors.values())
    seconds, name = (3600.0, "hours") if last - begin > 7200 else (60.0, "minutes")
    # Of many GPUs the outer ones tell most: the least and the most used.
    ordered = sorted(sensors, key=lambda label: sensors[label].mean() or 0.0)
    if len(ordered) > _MOST_LINES:
        ordered = ordered[:3] + ordered[-3:]
    nodes = _nodes(account)
    what, _, measure = title.partition(", ")

    def draw(axes: Axes, colors: Colors) -> None:
        for label in sorted(ordered):
            node, _, gpu = label.partition(" gpu_")
            times, values = sensors[label].with_gaps()
            number, nth = nodes.index(node), int(gpu or 0)
            # GPUs share the colour of their node, unless it is the only one.
            number, style = (number, _STYLES[nth % 4]) if len(nodes) > 1 else (nth, "")
            since = [(time - begin) / seconds for time in times]
            line(axes, since, values, label, colors, number, style)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a level line does not lie on the edge
        kind = "percent" if measure == "%" else ""
        every = [value for label in ordered for value in sensors[label].values]
        name_axes(axes, f"{name} since the start", f"{what}, {measure}", kind, every)

    shown = f" ({len(ordered)} of {len(sensors)})" if len(ordered) < len(sensors) else ""
    return Chart(what + shown, draw)
