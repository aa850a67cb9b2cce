"""The charts of one run: its metrics with restarts marked, and what its nodes measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from hpctrain.report.account.history import Series
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.slow_hosts import SlowHost, slow_hosts
from hpctrain.report.account.usage import Sensor
from hpctrain.report.views.charts import Chart, Colors, line, name_rows

_MOST_CHARTS, _MOST_LINES, _MOST_HOSTS = 12, 7, 8
_FIRST = ("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "tokens_per_s")
_LEFT_OUT = ("epoch", "gpu_hours", "samples_seen", "tokens_seen", "slowest_rank")
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
        charts.append(_slow_hosts(hosts))
    return charts


def _slow_hosts(hosts: Sequence[SlowHost]) -> Chart:
    shown = hosts[:_MOST_HOSTS][::-1]

    def draw(axes: Axes, colors: Colors) -> None:
        places = range(len(shown))
        values = [100 * each.slowest for each in shown]
        axes.barh(
            [place + 0.12 for place in places],
            values,
            0.24,
            color=colors.series[0],
            label="reports with the slowest rank",
        )
        if any(each.throttled is not None for each in shown):
            axes.barh(
                [place - 0.12 for place in places],
                [100 * (each.throttled or 0.0) for each in shown],
                0.24,
                color=colors.series[1],
                label="samples with a GPU too hot",
            )
        name_rows(axes, [each.host for each in shown])
        axes.set_xlim(0, 100)
        axes.set_xlabel("%")

    more = f" (the first {len(shown)} of {len(hosts)})" if len(shown) < len(hosts) else ""
    return Chart(f"slow hosts{more}", draw)


def _metric(title: str, series: Mapping[str, Series], restarts: Sequence[int]) -> Chart:
    def draw(axes: Axes, colors: Colors) -> None:
        for number, (name, each) in enumerate(list(series.items())[:_MOST_LINES]):
            line(axes, each.steps, each.values, name, colors, number)
        for number, step in enumerate(restarts):
            label = "restart" if number == 0 else ""
            axes.axvline(step, color=colors.text, linestyle=":", linewidth=0.8, label=label)
        axes.set_xlabel("step")
        every = [value for each in series.values() for value in each.finite()]
        if title in ("loss", "grad_norm") and every and min(every) > 0 < max(every):
            axes.set_yscale("log")

    names = list(series)
    return Chart(names[0] if len(names) == 1 else title, draw)


def _sensors(title: str, sensors: Mapping[str, Sensor], account: RunAccount) -> Chart:
    begin = account.spans[0].begin if account.spans else 0.0
    last = max(sensor.times[-1] for sensor in sensors.values())
    unit, name = (3600.0, "hours") if last - begin > 7200 else (60.0, "minutes")
    # Of many GPUs the outer ones tell most: the least and the most used.
    ordered = sorted(sensors.items(), key=lambda item: item[1].mean() or 0.0)
    if len(ordered) > _MOST_LINES:
        ordered = ordered[:3] + ordered[-3:]

    def draw(axes: Axes, colors: Colors) -> None:
        for number, (label, sensor) in enumerate(ordered):
            times = [(time - begin) / unit for time in sensor.times]
            line(axes, times, sensor.values, label, colors, number)
        axes.set_xlabel(f"{name} since the start")
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a level line does not lie on the edge

    shown = f" ({len(ordered)} of {len(sensors)})" if len(ordered) < len(sensors) else ""
    return Chart(title + shown, draw)
