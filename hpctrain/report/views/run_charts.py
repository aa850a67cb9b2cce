"""The charts of one run: its metrics with restarts marked, and what its nodes measured."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.usage import Sensor
from hpctrain.report.tree import Chart
from hpctrain.report.views.charts import line, metric_chart

_MOST_CHARTS, _MOST_LINES = 12, 7
_FIRST = ("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "tokens_per_s")
_LEFT_OUT = ("epoch", "gpu_hours", "samples_seen", "tokens_seen", "slowest_rank")
_GPU = {"utilization_percentage": "GPU use, %", "memory_usage_percentage": "GPU memory, %"}
_GPU |= {"power_usage_watts": "GPU power, W"}
_NODE = {"cpu_utilization_percentage": "cores, %", "system_memory_usage_megabytes": "memory, MB"}


def run_charts(account: RunAccount) -> list[Chart]:
    """Return the charts of a run; a sensor or a metric that it does not have has none."""
    restarts = [span.first_step for span in account.spans[1:]]
    names = [name for name, series in account.history.metrics.items() if len(series.steps) > 1]
    groups = dict.fromkeys(name.rpartition("/")[2] for name in names)
    order = [name for name in _FIRST if name in groups]
    order += sorted(name for name in groups if name not in (*_FIRST, *_LEFT_OUT))
    charts = []
    for name in order[:_MOST_CHARTS]:
        series = {n: account.history.series(n) for n in names if n.rpartition("/")[2] == name}
        charts.append(metric_chart(next(iter(series)), series, restarts))
    usage, begin = account.usage, account.spans[0].begin if account.spans else 0.0
    nodes = {node: number for number, node in enumerate(sorted(usage.nodes))}
    found: dict[str, dict[str, tuple[int, Sensor]]] = {
        title: {
            # GPUs share the colour of their node, unless it is the only one.
            f"{node} {gpu}": (nodes[node] if len(nodes) > 1 else int(gpu[4:]), sensor)
            for (node, gpu), sensor in usage.of_gpus(name).items()
        }
        for name, title in _GPU.items()
    }
    for name, title in _NODE.items():
        found[title] = {node: (nodes[node], each) for node, each in usage.of_nodes(name).items()}
    charts += [
        _sensor_chart(title, lines, begin)
        for title, lines in found.items()
        if any(len(each.times) > 1 for _, each in lines.values())
    ]
    return charts


def _sensor_chart(title: str, lines: Mapping[str, tuple[int, Sensor]], begin: float) -> Chart:
    """Return the chart of a sensor over the time: its lines by name, each with its colour."""
    # Of many GPUs the outer ones tell most: the least and the most used.
    ordered = sorted(lines, key=lambda name: lines[name][1].mean() or 0.0)
    shown = ordered if len(ordered) <= _MOST_LINES else ordered[:3] + ordered[-3:]
    long = max(sensor.times[-1] - begin for _, sensor in lines.values()) > 7200
    seconds, name = (3600.0, "hours") if long else (60.0, "minutes")

    def draw(axes: Axes) -> None:
        for label in sorted(shown):
            number, sensor = lines[label]
            times, values = sensor.with_gaps()
            line(axes, [(time - begin) / seconds for time in times], values, label, number)
        axes.set_ylim(0)
        axes.set_xlabel(f"{name} since the start")
        axes.set_ylabel(title)

    more = f" ({len(shown)} of {len(lines)})" if len(shown) < len(lines) else ""
    return Chart(title.partition(",")[0] + more, draw)
