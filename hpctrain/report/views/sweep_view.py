"""The report of a sweep on the terminal: the best runs, what mattered, and what has failed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hpctrain.commands.state import duration
from hpctrain.console import Cell
from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.sweeps.parameters import Sweep, cause
from hpctrain.report.sweeps.seeds import Setting

_BEST, _FAILED, _NOTES = 10, 20, 8


def show_sweep(accounts: Sequence[RunAccount], sweep: Sweep) -> RenderableType:
    """Return the report of several runs."""
    parts: list[RenderableType] = [_totals(accounts), Text(), _best(sweep)]
    if importance := sweep.importance():
        parts += [Text(), Text(f"Variance of {sweep.metric} explained alone", style="bold")]
        for key, share in importance.items():
            parts.append(Text(f"  {Cell(key).plain:<30} {100 * share:5.1f}%"))
    if sweep.others:
        parts += [Text(), Text("Without a result", style="bold")]
        for account in sweep.others[:_FAILED]:
            parts.append(Text(f"  {Cell(account.name).plain}  {Cell(cause(account)).plain}"))
        if len(sweep.others) > _FAILED:
            parts.append(Text(f"  ... {len(sweep.others) - _FAILED} more (--json)"))
    parts += _notes(accounts)
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
    shown = sweep.finished[:_BEST]
    table = Table(box=None, padding=(0, 2), header_style="")
    # A run is named by its whole name, so on a narrow terminal the other columns give way.
    table.add_column("  best runs", no_wrap=True, min_width=max(len(r.name) for r in shown) + 2)
    table.add_column(Cell(sweep.metric), min_width=7)
    for key in sweep.keys:
        table.add_column(Cell(key.rpartition(".")[2]))
    table.add_column("time", justify="right")
    table.add_column("goodput", justify="right")
    for account in shown:
        share = account.goodput
        table.add_row(
            Cell(f"  {account.name}"),
            f"{account.final(sweep.metric):.5g}",
            *(Cell(account.swept.get(key, "")) for key in sweep.keys),
            duration(account.time["allocated"]),
            "" if share is None else f"{100 * share:.0f}%",
        )
    return table


def _notes(accounts: Sequence[RunAccount]) -> list[RenderableType]:
    """Return each note once, with the number of runs that it is about."""
    counts: dict[str, int] = {}
    for account in accounts:
        for note in notes(account):
            if "no ground for advice" not in note:
                counts[note] = counts.get(note, 0) + 1
    if not counts:
        return []
    lines: list[RenderableType] = [Text(), Text("Notes", style="bold")]
    for note, count in sorted(counts.items(), key=lambda item: -item[1])[:_NOTES]:
        lines.append(Text(f"  * {count} run{'s' * (count > 1)}: {Cell(note).plain}"))
    return lines


def show_settings(found: Sequence[Setting], over: str) -> RenderableType:
    """Return the table of settings, each with mean, interval and number of its runs."""
    keys = list(dict.fromkeys(key for setting in found for key in setting.values))
    metrics = list(found[0].estimates) if found else []
    table = Table(box=None, padding=(0, 2), header_style="")
    for title in (*(key.rpartition(".")[2] for key in keys), *metrics, "n"):
        table.add_column(Cell(title))
    for setting in found:
        table.add_row(
            *(Cell(setting.values.get(key, "")) for key in keys),
            *(setting.estimates[metric].text() for metric in metrics),
            str(len(setting.runs)),
        )
    parts: list[RenderableType] = [
        Text(f"mean ± 95% confidence interval of the mean (t), over {over}"),
        table,
    ]
    for setting in found:
        for name, why in setting.missing.items():
            text = f"without {name} ({setting.label}): {why}"
            parts.append(Text(Cell(text).plain, style="yellow"))
    return Group(*parts)
