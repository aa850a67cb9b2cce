"""The charts of several runs: curves, parameters against the metric, bands of seeds, scaling."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.sweeps.parameters import Sweep, label
from hpctrain.report.sweeps.scaling import Scaling
from hpctrain.report.sweeps.seeds import Setting, estimate
from hpctrain.report.tree import Chart
from hpctrain.report.views.charts import line, name_axes

_MOST_KEYS, _MOST_LINES = 6, 7
_LONGEST = 40  # characters in a legend


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Return the charts of a sweep: its best curves, and the metric against each parameter."""
    if not sweep.finished:
        return []
    varied = [key for key in sweep.keys if len({a.swept.get(key) for a in sweep.finished}) > 1]
    return [_curves(sweep), *(_scatter(sweep, key) for key in varied[:_MOST_KEYS])]


def _curves(sweep: Sweep) -> Chart:
    def draw(axes: Axes) -> None:
        for number, account in enumerate(sweep.finished[:_MOST_LINES]):
            series = account.history.series(sweep.metric)
            told = label({key: account.swept.get(key, "") for key in sweep.keys})
            name = told if 0 < len(told) <= _LONGEST else account.name
            line(axes, series.steps, series.values, name, number)
        name_axes(axes, "step", sweep.metric)

    return Chart(f"best runs: {sweep.metric}", draw)


def _scatter(sweep: Sweep, key: str) -> Chart:
    """Return the metric against the values of a key, at equal distances: they may span decades."""

    def place(account: RunAccount) -> tuple[float, str]:
        value = account.swept.get(key, "")
        try:
            return float(value), value
        except ValueError:
            return 0.0, value

    def draw(axes: Axes) -> None:
        accounts = sorted(sweep.finished, key=place)
        values = [account.swept.get(key, "")[:14] for account in accounts]
        axes.scatter(values, [each.final(sweep.metric) for each in accounts], s=14, alpha=0.7)
        axes.xaxis.set_ticks(range(0, len({*values}), max(1, len({*values}) // 5)))
        name_axes(axes, key, sweep.metric)

    return Chart(f"{sweep.metric} against {key.rpartition('.')[2]}", draw)


def settings_chart(found: Sequence[Setting], metric: str) -> Chart:
    """Return the mean of the seeds over the steps, with its interval."""
    shown = found[:_MOST_LINES]

    def draw(axes: Axes) -> None:
        for number, setting in enumerate(shown):
            curves = [
                dict(zip(series.steps, series.values, strict=True))
                for series in (account.history.series(metric) for account in setting.runs)
            ]
            steps = sorted(set.intersection(*map(set, curves))) if curves else []
            if not steps:
                continue
            estimates = [estimate([curve[step] for curve in curves]) for step in steps]
            line(axes, steps, [each.mean for each in estimates], setting.label, number)
            low = [each.mean - (each.half or 0) for each in estimates]
            high = [each.mean + (each.half or 0) for each in estimates]
            axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        name_axes(axes, "step", metric)

    more = f" (the first {len(shown)} of {len(found)})" if len(found) > len(shown) else ""
    return Chart(f"{metric}: mean and 95% interval{more}", draw)


def scaling_chart(series: Scaling) -> Chart:
    """Return the speed-up of a series beside the ideal one."""
    ranks = [point.ranks for point in series.points]

    def draw(axes: Axes) -> None:
        axes.plot(ranks, [series.speedup(point) for point in series.points], "o", label="measured")
        line(axes, ranks, [each / ranks[0] for each in ranks], "ideal", 6)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_ylabel("speed-up")

    return Chart("speed-up", draw)
