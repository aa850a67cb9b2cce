"""`python -m hpctrain report`: where the time, the GPUs and the energy of runs went.

report RUN                 bars, figures and notes      --json       all numbers, a list of runs
report SWEEP               best runs, parameters        --html FILE  one page without network access
report SWEEP --over seed   mean and interval
report --compare RUN RUN   what differs, and where they part
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import temporary
from hpctrain.base.terminal.console import Console, print_json
from hpctrain.commands import select
from hpctrain.insight.report import compare_tree, run_tree, sweep_tree
from hpctrain.insight.report.account.run_account import RunAccount, read
from hpctrain.insight.report.tree import Section, as_json
from hpctrain.insight.report.views import terminal_view
from hpctrain.search.standing import Standing


def main(argv: Sequence[str]) -> int:
    """Print the reports of runs; return the exit code."""
    options = _parse(argv)
    if options.html:
        check_file("--html", options.html)
    paths = select.select(options.dir, options.runs, several=not options.compare)
    if options.compare:
        title, sections = compare_tree.compared(paths)
        told: Any = as_json(sections)
    else:
        title, sections, told = _report(paths, options)
    if options.json:
        print_json(told)
    else:
        Console().print(terminal_view.show(title, sections))
    if options.html:
        from hpctrain.insight.report.views import html_view

        write_file(options.html, html_view.page(title, sections))
    return 0


def _report(paths: Sequence[Path], options: argparse.Namespace) -> tuple[str, list[Section], Any]:
    """Return a title, what people are told, and what programs are."""
    if not paths:
        raise ConfigError(f"{options.dir}: it has no runs to report on; --dir says where they are")
    accounts = read(paths)
    sweep = select.one_sweep(options.dir, options.runs)
    search = Standing.of(sweep, (each.facts for each in accounts))
    told = [as_json(run_tree.tree(account)) for account in accounts if options.json]
    if len(accounts) == 1 and not (options.over or search):
        curves = []
        if options.html:
            from hpctrain.insight.report.views import charts  # matplotlib takes a second to import

            curves = charts.run_charts(accounts[0])
        return accounts[0].name, run_tree.tree(accounts[0], curves), told
    sections = _several(accounts, options, search)
    more = as_json(sections)
    return f"{len(accounts)} runs", sections, {**more, "runs": told} if more else told


def _several(
    accounts: Sequence[RunAccount], options: argparse.Namespace, search: Standing | None
) -> list[Section]:
    from hpctrain.insight.report.sweeps import parameters, scaling, seeds

    parameters.check_metrics(accounts, options.metric or [])
    default = search.found.metric if search else None
    sweep = parameters.SweptRuns.of(accounts, options.metric[0] if options.metric else default)
    if search:  # a trial that pauses or is pruned has a result
        lost = [each for each in sweep.others if each.state.name not in ("paused", "running")]
        sweep = replace(sweep, others=lost)
    metrics = options.metric or [sweep.metric]
    found = seeds.settings(accounts, options.over, metrics) if options.over else []
    series = scaling.Scaling.of(accounts)
    drawn = []
    if options.html:
        from hpctrain.insight.report.views import charts

        drawn += [charts.scaling_chart(series)] if series and series.points else []
        drawn += [charts.sweep_chart(sweep)] if sweep.finished else []
    return sweep_tree.tree(accounts, sweep, found, series, search, drawn)


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
        "--compare",
        action="store_true",
        help="show what differs between two runs, and the first step at which they part",
    )
    parser.add_argument(
        "--over", metavar="KEY", help="mean and interval over the values of a key, such as seed"
    )
    return parser.parse_args(argv)


def check_file(option: str, file: Path, ending: str = "") -> None:
    """Check that a file can be made, before runs are read; raise a ConfigError if not."""
    if ending and file.suffix.lower() != ending:
        raise ConfigError(f"{option} {file}: it must end in {ending}; `report --html` makes a page")
    if not file.resolve().parent.is_dir() or file.is_dir():
        raise ConfigError(f"{option} {file}: no file can be written there")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs the package matplotlib: pip install 'hpctrain[prep]'")


def write_file(file: Path, content: str | bytes) -> None:
    """Write a file, at once; raise a StorageError if that is impossible."""
    unfinished = temporary(file)
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise StorageError(f"{file}: cannot be written ({error.strerror})") from error
