"""`python -m hpctrain report`: where the time, the GPUs and the energy of runs went.

report RUN           bars, figures and notes        --json      all numbers, a list of runs
report SWEEP         best runs, what mattered       --html FILE one page without network access
report SWEEP --over seed   mean and interval
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpctrain.console import Cell, Console, print_json
from hpctrain.errors import ConfigError
from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount, read
from hpctrain.report.account.slow_hosts import slow_hosts
from hpctrain.report.account.standing import verdict, why
from hpctrain.report.views import output, terminal_view
from hpctrain.runs.state import select
from hpctrain.search.standing import Standing


def main(argv: Sequence[str]) -> int:
    """Print the reports of runs; return the exit code."""
    options = _parse(argv)
    if options.html:
        output.check("--html", options.html)
    paths = select.select(options.dir, options.runs, several=True)
    if not paths:
        raise ConfigError(f"{options.dir}: it has no runs to report on; --dir says where they are")
    accounts = read(paths)
    search = Standing.of(
        select.one_sweep(options.dir, options.runs), (each.facts for each in accounts)
    )
    told: Any = None
    if options.json:
        told = [as_json(account) for account in accounts]
        if search or options.over:
            told = {"runs": told} | ({"search": search.facts()} if search else {})
        if not options.over:
            print_json(told)
    if len(accounts) == 1 and not (options.over or search):
        _one(accounts[0], options)
    else:
        _several(accounts, options, search, told)
    return 0


def as_json(account: RunAccount) -> dict[str, Any]:
    """Return the account for `print_json`; None where a figure is not known.

    Seconds are those of the allocations, and the parts of `time` add up to `allocated`.
    """
    (cost, currency), best = account.cost or (None, None), account.best
    return {
        "run": account.name,
        "path": str(account.facts.path),
        "state": account.state.name,
        "reason": account.state.reason,
        "verdict": verdict(account),
        "as_of": account.now,
        "in_progress": bool(account.spans and account.spans[-1].runs),
        "swept": account.swept,
        "step": account.step,
        "samples": account.samples,
        "time": {name: round(seconds, 3) for name, seconds in account.time.items()},
        "attempts": [
            {
                "attempt": span.number,
                "begin": span.begin,
                "seconds": round(span.seconds, 3),
                "first_step": span.first_step,
                "reached": span.reached,
                "state": span.state,
                "why": why(span),
                "hosts": account.hosts(span),
                "world_size": span.facts.world_size,
                "job_id": span.facts.job_id,
                "time": {name: round(value, 3) for name, value in span.parts.items()},
            }
            for span in account.spans
        ],
        "queue_s": account.queue_s,
        "goodput": account.goodput,
        "gpu_hours": account.gpu_hours,
        "idle_gpu_hours": account.idle_gpu_hours,
        "core_hours": account.core_hours,
        "kwh": account.kwh,
        "cost": cost,
        "currency": currency,
        "per": account.per,
        "gpu_memory_gib": account.gpu_memory_gib,
        "gpu_utilization_percent": account.usage.gpu_use,
        "memory_gb": account.usage.memory_gb,
        "slow_hosts": [asdict(each) for each in slow_hosts(account)],
        "best": best if best is None or math.isfinite(best["value"]) else None,
        "metrics": {name: each.last() for name, each in sorted(account.history.metrics.items())},
        "notes": notes(account),
        "left_out": account.left_out,
    }


def _one(account: RunAccount, options: argparse.Namespace) -> None:
    if not options.json:
        Console().print(terminal_view.show(account))
    if options.html:  # matplotlib takes a second to import
        from hpctrain.report.views import html_view, run_charts

        output.write(options.html, html_view.run_page(account, run_charts.run_charts(account)))


def _several(
    accounts: Sequence[RunAccount],
    options: argparse.Namespace,
    search: Standing | None,
    told: Any,
) -> None:
    from hpctrain.report.sweeps import parameters, scaling_fit, seeds

    parameters.check_metrics(accounts, options.metric or [])
    default = search.found.metric if search else None
    sweep = parameters.Sweep.of(accounts, options.metric[0] if options.metric else default)
    if search:  # a trial that pauses or is pruned has a result
        lost = [each for each in sweep.others if each.state.name not in ("paused", "running")]
        sweep = replace(sweep, others=lost)
    metrics = options.metric or [sweep.metric]
    found = seeds.settings(accounts, options.over, metrics) if options.over else []
    scaling = scaling_fit.Scaling.of(accounts)
    lines = scaling.lines() if scaling else []
    if options.json and options.over:
        print_json({"settings": [each.facts() for each in found], **told})
    elif not options.json:
        shown = terminal_view.show_settings(found, options.over) if found else None
        console = Console()
        console.print(shown or terminal_view.show_sweep(accounts, sweep, search))
        for line in lines:
            console.print(Cell(line))
    if not options.html:
        return
    from hpctrain.report.views import html_view, sweep_charts

    drawn = sweep_charts.scaling_charts(scaling) if scaling else []
    drawn += [sweep_charts.settings_chart(found, metric) for metric in metrics if found]
    drawn += [sweep_charts.search_chart(search.found, accounts)] if search else []
    drawn += sweep_charts.sweep_charts(sweep)
    page = html_view.sweep_page(accounts, sweep, found, drawn, lines, search)
    output.write(options.html, page)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain report",
        description="Show where the time of runs went, what they cost, and what to change.",
        allow_abbrev=False,
    )
    select.add_arguments(parser, "all runs if none is named")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with charts")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="compare runs by this metric (default: the one of their config); with --over several",
    )
    parser.add_argument(
        "--over", metavar="KEY", help="mean and interval over the values of a key, such as seed"
    )
    return parser.parse_args(argv)
