"""The charts of one run: its metrics, with restarts marked."""

from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.insight.report.tree import Chart
from hpctrain.insight.report.views.charts import metric_chart

_MOST_CHARTS = 12
_FIRST = ("loss", "accuracy", "lr", "grad_norm", "samples_per_s", "tokens_per_s")
_LEFT_OUT = ("epoch", "gpu_hours", "samples_seen", "tokens_seen")


def run_charts(account: RunAccount) -> list[Chart]:
    """Return the charts of a run; a metric that it does not have has none."""
    restarts = [span.first_step for span in account.spans[1:]]
    names = [name for name, series in account.history.metrics.items() if len(series.steps) > 1]
    groups = dict.fromkeys(name.rpartition("/")[2] for name in names)
    order = [name for name in _FIRST if name in groups]
    order += sorted(name for name in groups if name not in (*_FIRST, *_LEFT_OUT))
    charts = []
    for name in order[:_MOST_CHARTS]:
        series = {n: account.history.series(n) for n in names if n.rpartition("/")[2] == name}
        charts.append(metric_chart(next(iter(series)), series, restarts))
    return charts
