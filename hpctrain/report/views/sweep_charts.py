"""The charts of several runs: parameters against the metric, bands of seeds, and scaling."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

from hpctrain.config.metric_registry import unit
from hpctrain.metric_names import better
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.sweeps.parameters import Sweep, label
from hpctrain.report.sweeps.scaling import Scaling
from hpctrain.report.sweeps.seeds import Setting, estimate
from hpctrain.report.tree import Chart
from hpctrain.report.views.charts import line, name_axes, vertical
from hpctrain.search.trials import Found

_MOST_KEYS, _MOST_LINES = 6, 7
_LONGEST = 40  # characters in a legend


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Return the charts of a sweep: its best curves, and the metric against each parameter."""
    if not sweep.finished:
        return []
    varied = [key for key in sweep.keys if len({a.swept.get(key) for a in sweep.finished}) > 1]
    keys = dict.fromkeys([*sweep.importance(), *varied])
    return [_curves(sweep), *(_scatter(sweep, key) for key in [*keys][:_MOST_KEYS])]


def search_chart(found: Found, accounts: Sequence[RunAccount]) -> Chart:
    """Return the curves of all trials, with the rungs."""
    rungs = {trial.run: trial.rung for trial in found.trials}

    def draw(axes: Axes) -> None:
        named = set[int]()
        for account in sorted(accounts, key=lambda each: rungs.get(each.name, 0)):
            series, rung = account.history.series(found.metric), rungs.get(account.name, 0)
            name = "" if rung in named or not series.steps else f"to rung {rung}"
            named.add(rung)
            line(axes, series.steps, series.values, name, rung, "-")
        for rung in found.rungs:
            vertical(axes, rung)
        axes.set_xscale("log")
        _name_axes(axes, "step", found.metric, accounts)

    return Chart(f"trials: {found.metric}; rungs are dotted", draw)


def _curves(sweep: Sweep) -> Chart:
    best = sweep.finished[:_MOST_LINES]

    def draw(axes: Axes) -> None:
        for number, account in enumerate(best):
            series = account.history.series(sweep.metric)
            told = label({key: account.swept.get(key, "") for key in sweep.keys})
            name = told if 0 < len(told) <= _LONGEST else account.name
            line(axes, series.steps, series.values, name, number)
        _name_axes(axes, "step", sweep.metric, best)

    return Chart(f"best runs: {sweep.metric}", draw)


def _positions(accounts: Sequence[RunAccount], key: str) -> tuple[list[float], dict[float, str]]:
    """Return the position of each run on the axis of a key, and the texts of its ticks.

    Numbers keep their order, and equal distances: the values of a grid often span decades.
    """
    values = [account.swept.get(key, "") for account in accounts]
    try:
        order = sorted(set(values), key=float)
    except ValueError:
        order = sorted(set(values))
    place = {value: float(index) for index, value in enumerate(order)}
    step = max(1, len(order) // 5)
    ticks = {place[value]: value[:14] for value in order[::step]}
    return [place[value] for value in values], ticks


def _scatter(sweep: Sweep, key: str) -> Chart:
    def draw(axes: Axes) -> None:
        positions, ticks = _positions(sweep.finished, key)
        scores = [account.final(sweep.metric) for account in sweep.finished]
        axes.scatter(positions, scores, color="C0", s=14, alpha=0.7)
        axes.set_xticks(list(ticks), list(ticks.values()))
        _name_axes(axes, key, sweep.metric, sweep.finished)

    return Chart(f"{sweep.metric} against {key.rpartition('.')[2]}", draw)


def _name_axes(axes: Axes, x: str, metric: str, accounts: Iterable[RunAccount]) -> None:
    """Name the axes of a chart of a metric, and keep them within what these runs can have."""
    values = [value for run in accounts for value in run.history.series(metric).finite()]
    direction = better(metric)
    more = ", ".join(filter(None, (unit(metric), f"{direction} is better" if direction else "")))
    name_axes(axes, x, metric + (f" ({more})" if more else ""), metric, values)


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
            if len(curves) > 1:
                low = [each.mean - (each.half or 0) for each in estimates]
                high = [each.mean + (each.half or 0) for each in estimates]
                axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.2, linewidth=0)
        _name_axes(axes, "step", metric, [run for setting in shown for run in setting.runs])

    more = f" (the first {len(shown)} of {len(found)})" if len(found) > len(shown) else ""
    return Chart(f"{metric}: mean and 95% interval{more}", draw)


def scaling_charts(series: Scaling) -> list[Chart]:
    """Return the charts of a series; none with less than two points."""
    if len(series.points) < 2:
        return []
    return [
        Chart("speed-up", lambda axes: _speedup(series, axes)),
        Chart("efficiency", lambda axes: _efficiency(series, axes)),
    ]


def _speedup(series: Scaling, axes: Axes) -> None:
    ranks = [point.ranks for point in series.points]
    first = ranks[0]
    speedups = [series.speedup(point) for point in series.points]
    axes.plot(ranks, speedups, "o", color="C0", label="measured")
    line(axes, ranks, [each / first for each in ranks], "ideal", 6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel(f"times the speed of {first} rank{'s' * (first > 1)}")


def _efficiency(series: Scaling, axes: Axes) -> None:
    ranks = [point.ranks for point in series.points]
    axes.bar(
        [str(each) for each in ranks],
        [100 * series.efficiency(point) for point in series.points],
        color="C0",
    )
    axes.axhline(95, color="C2", linestyle=":", label="good")
    axes.axhline(81, color="C4", linestyle=":", label="acceptable")
    axes.set_ylim(0, 110)
    axes.set_xlabel("ranks")
    axes.set_ylabel("% of an ideal speed-up")
