"""What a report tells of several runs: the best, seeds, scaling, and what failed."""

from collections.abc import Sequence
from dataclasses import asdict

from hpctrain.base.units import duration
from hpctrain.insight.report import run_tree
from hpctrain.insight.report.account.advice import notes
from hpctrain.insight.report.account.run_account import RunAccount
from hpctrain.insight.report.sweeps.parameters import SweptRuns, cause, label
from hpctrain.insight.report.sweeps.scaling import Scaling
from hpctrain.insight.report.sweeps.seeds import SeedGroup
from hpctrain.insight.report.tree import (
    Chart,
    Curves,
    Fact,
    Pairs,
    Rows,
    Section,
    Sentences,
    number,
)
from hpctrain.search.standing import Standing
from hpctrain.tracking.links import pages_of

_INTERVAL = "Mean and 95% confidence interval of the mean (t)"


def tree(
    accounts: Sequence[RunAccount],
    sweep: SweptRuns,
    settings: Sequence[SeedGroup],
    scaling: Scaling | None,
    search: Standing | None,
    charts: Sequence[Chart] = (),
) -> list[Section]:
    """Return the report of several runs; the settings are those of `--over`."""
    said = search.said() if search else sweep.answer()
    return [
        Sentences("", "", said),
        Pairs("", [Fact("search", search.facts())] if search else []),
        Pairs("", [*_totals(accounts), *_best(sweep)]),
        Rows(_INTERVAL, "settings" if settings else "", _settings(settings)),
        *(_scaling(scaling) if scaling else []),
        Curves([*charts]),
        *(_trials(search) if search else [_runs(sweep)]),
        Rows.of("Without a result", ["run", "values", "why"], _without(sweep, settings)),
        Sentences("Notes", "", _shared_notes(accounts)),
    ]


def _scaling(series: Scaling) -> list[Section]:
    return [
        Rows(f"{series.kind.capitalize()} scaling", "scaling", series.rows()),
        Sentences("Not in the series", "", series.left_out),
    ]


def _totals(accounts: Sequence[RunAccount]) -> list[Fact]:
    seconds = sum(account.time["allocated"] for account in accounts)
    priced = [account.cost for account in accounts if account.cost is not None]
    cost = {
        currency: sum(amount for amount, other in priced if other == currency)
        for currency in sorted({currency for _, currency in priced})
    }
    return [
        Fact("", None, "allocated", duration(seconds)),
        number("", sum(account.gpu_hours for account in accounts), "GPU-hours", "{:.3g}"),
        Fact("", None, "cost", ", ".join(f"{cost[each]:.2f} {each}" for each in cost)),
    ]


def _best(sweep: SweptRuns) -> list[Fact]:
    if not sweep.finished:
        return []
    best = sweep.finished[0]
    pages = zip(("its page", "all runs"), pages_of(best.facts.path), strict=False)
    return [
        Fact("", None, "its command", run_tree.command(best)),
        *(Fact("", None, f"{name} in MLflow", page, page) for name, page in pages),
    ]


def _settings(settings: Sequence[SeedGroup]) -> list[list[Fact]]:
    keys = dict.fromkeys(key for setting in settings for key in setting.values)
    return [
        [
            Fact("values", each.values),
            *(Fact("", None, key, each.values.get(key, "")) for key in keys),
            Fact("metrics", {name: asdict(found) for name, found in each.estimates.items()}),
            *(Fact("", None, name, found.text()) for name, found in each.estimates.items()),
            Fact("runs", [run.name for run in each.runs], "n", str(len(each.runs))),
            Fact("missing", each.missing),
        ]
        for each in settings
    ]


def _without(sweep: SweptRuns, settings: Sequence[SeedGroup]) -> list[list[str]]:
    found = {each.name: [label(each.swept), cause(each)] for each in sweep.others}
    for setting in settings:
        for name, reason in setting.missing.items():
            found.setdefault(name, [label(setting.values) or "all runs", reason])
    return [[name, *cells] for name, cells in found.items()]


def _trials(search: Standing) -> list[Section]:
    titles = "Rungs", "Trials, the best of the highest rung first"
    tables = zip(titles, search.tables(), strict=True)
    return [Rows.of(title, heads, rows) for title, (heads, *rows) in tables]


def _runs(sweep: SweptRuns) -> Rows:
    keys = [key.rpartition(".")[2] for key in sweep.keys]
    heads = ["run", sweep.metric, *keys, "time", "goodput"]
    return Rows.of("Runs, best first", heads, [sweep.cells(each) for each in sweep.finished])


def _shared_notes(accounts: Sequence[RunAccount]) -> list[str]:
    """Return each note once, with the run that it is about, or with the number of runs.

    What looks wrong with a run that has a result comes first: its result may be worth nothing.
    """
    wrong: dict[str, list[str]] = {}
    about: dict[str, list[str]] = {}
    for account in accounts:
        if account.state.name == "finished":
            for text in account.facts.record.noted():
                wrong.setdefault(text, []).append(account.name)
        for text in notes(account):
            if "no ground for advice" not in text:
                about.setdefault(text, []).append(account.name)
    return [
        f"{f'{len(names)} runs' if len(names) > 1 else names[0]}: {text}"
        for part in (wrong, about)
        for text, names in sorted(part.items(), key=lambda item: -len(item[1]))
    ]
