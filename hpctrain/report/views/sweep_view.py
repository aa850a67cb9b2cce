"""The report of a sweep on the terminal: the best runs, what mattered, and what has failed."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.console import Cell, Table
from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.sweeps import search_trials
from hpctrain.report.sweeps.parameters import Sweep, cause
from hpctrain.report.sweeps.seeds import Setting, columns
from hpctrain.report.views.terminal_view import bullets
from hpctrain.runs.state.state import duration
from hpctrain.search.standing import Standing

_BEST, _TRIALS, _FAILED, _NOTES = 10, 20, 20, 8


def show_sweep(
    accounts: Sequence[RunAccount], sweep: Sweep, search: Standing | None = None
) -> RenderableType:
    """Return the report of several runs, or of a search."""
    parts: list[RenderableType] = [_totals(accounts), Text()]
    if search:
        parts += [*search.shown(_TRIALS), Text(), bullets(search_trials.said(search))]
    else:
        parts.append(_best(sweep))
    if not search and (importance := sweep.importance()):
        parts += [Text(), Text(f"Variance of {sweep.metric} explained alone", style="bold")]
        table = Table("", "", right=(1,))
        for key, share in importance.items():
            table.add_row(f"  {key}", f"{100 * share:.1f}%")
        parts.append(table)
    if sweep.others:
        parts += [Text(), Text("Without a result", style="bold")]
        table = Table("", "")
        for account in sweep.others[:_FAILED]:
            table.add_row(f"  {account.name}", cause(account))
        parts.append(table)
        if len(sweep.others) > _FAILED:
            parts.append(Text(f"  ... {len(sweep.others) - _FAILED} more (--json)"))
    if said := shared_notes(accounts):
        parts += [Text(), Text("Notes", style="bold"), bullets(said)]
    return Group(*parts)


def _totals(accounts: Sequence[RunAccount]) -> Text:
    seconds = sum(account.time["allocated"] for account in accounts)
    hours = sum(account.gpu_hours for account in accounts)
    text = Text(f"{len(accounts)} runs", style="bold")
    text.append(f", {duration(seconds)} allocated", style="not bold")
    if hours:
        text.append(f", {hours:.3g} GPU-hours", style="not bold")
    priced = [account.cost for account in accounts if account.cost is not None]
    for currency in sorted({currency for _, currency in priced}):
        amount = sum(amount for amount, other in priced if other == currency)
        text.append(f", {amount:.2f} {currency}", style="not bold")
    return text


def _best(sweep: Sweep) -> RenderableType:
    if not sweep.finished:
        return Text(f"No run has a value of {Cell(sweep.metric).plain}.")
    keys = [key.rpartition(".")[2] for key in sweep.keys]
    table = Table("  best runs", sweep.metric, *keys, "time", "goodput")
    for account in sweep.finished[:_BEST]:
        name, *cells = sweep.cells(account)
        table.add_row(f"  {name}", *cells)
    return table


def shared_notes(accounts: Sequence[RunAccount]) -> list[str]:
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
    texts = []
    for part in (wrong, about):
        for text, names in sorted(part.items(), key=lambda item: -len(item[1]))[:_NOTES]:
            who = f"{len(names)} runs" if len(names) > 1 else names[0]
            texts.append(f"{who}: {text}")
    return texts


def show_settings(found: Sequence[Setting], over: str) -> RenderableType:
    """Return the table of settings, each with mean, interval and number of its runs."""
    keys, metrics = columns(found)
    table = Table(*(key.rpartition(".")[2] for key in keys), *metrics, "n")
    for setting in found:
        table.add_row(*setting.cells(keys))
    parts: list[RenderableType] = [
        Text(f"mean ± 95% confidence interval of the mean (t), over {over}"),
        table,
    ]
    for setting in found:
        for name, why in setting.missing.items():
            text = f"without {name} ({setting.label}): {why}"
            parts.append(Text(Cell(text).plain, style="yellow"))
    return Group(*parts)
