"""Reports on the terminal.

one run        bars as jobstats prints them, figures, and notes
several runs   the best, what mattered, and what has failed
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.console import Cell, Table
from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.standing import why
from hpctrain.report.sweeps import search_trials
from hpctrain.report.sweeps.parameters import Sweep, cause
from hpctrain.report.sweeps.seeds import Setting, columns
from hpctrain.search.standing import Standing
from hpctrain.terminal import few
from hpctrain.units import duration

_BAR = 20  # characters; a line fits into 60
_BEST, _TRIALS, _FAILED, _NOTES = 10, 20, 20, 8  # rows of each


def show(account: RunAccount) -> RenderableType:
    """Return the report of a run."""
    parts: list[RenderableType] = [_head(account)]
    if account.spans:
        parts += [Text(), *_bars(account), Text(), _rows(figures(account))]
        if len(account.spans) > 1:
            parts += [Text(), _attempts(account)]
    parts += _list("Notes", notes(account)) + _list("Left out", account.left_out)
    return Group(*parts)


def _head(account: RunAccount) -> Text:
    text = Text(account.name, style="bold")
    text.append(f"  {account.state.name}", style="not bold")
    if account.state.reason:
        text.append(f": {Cell(account.state.reason).plain}", style="not bold")
    return text


def _bars(account: RunAccount) -> Iterable[Text]:
    """Yield a line for each part of the time that there is, as jobstats draws them."""
    for title, seconds, share in account.shown_parts():
        yield _bar(title, share, duration(seconds))
    usage = account.usage
    loads = ("GPU use", usage.gpu_use), ("GPU memory", usage.gpu_memory), ("cores", usage.cores_use)
    found = [(title, value) for title, value in loads if value is not None]
    if found:
        yield Text()
    for title, value in found:
        yield _bar(title, value / 100, "")


def _bar(title: str, share: float, text: str) -> Text:
    filled = round(_BAR * min(1.0, max(0.0, share)))
    drawn = "|" * filled + " " * (_BAR - filled)
    return Text(f"  {title:<15}[{drawn}{100 * share:5.1f}%]  {text}".rstrip())


def _rows(pairs: Iterable[tuple[str, str]], right: tuple[int, ...] = ()) -> Table:
    table = Table("", "", right=right)
    for name, text in pairs:
        table.add_row(f"  {name}", text)
    return table


def figures(account: RunAccount) -> list[tuple[str, str]]:
    """Return the figures of a run as rows of a name and a text; what is unknown is left out."""
    rows = [("allocated", duration(account.time["allocated"]))]
    if account.queue_s is not None and account.queue_s > 0:
        rows.append(("in the queue", duration(account.queue_s)))
    if account.goodput is not None:
        rows.append(("goodput", f"{100 * account.goodput:.1f}%"))
    if account.gpu_hours:
        idle = account.idle_gpu_hours
        more = f", of which idle {idle:.3g}" if idle is not None else ""
        rows.append(("GPU-hours", f"{account.gpu_hours:.3g}{more}"))
    else:
        rows.append(("core-hours", f"{account.core_hours:.3g}"))
    if (kwh := account.kwh) is not None:
        rows.append(("energy", f"{kwh:.3g} kWh"))
    if account.cost is not None:
        rows.append(("cost", f"{account.cost[0]:.2f} {account.cost[1]}"))
    for what, costs in account.per.items():
        rows.append((f"per {what}", ", ".join(_costs(costs, account))))
    if account.gpu_memory_gib is not None:
        rows.append(("peak GPU memory", f"{account.gpu_memory_gib:.1f} GiB"))
    if (memory := account.usage.memory_gb) is not None:
        rows.append(("peak memory", f"{memory:.2f} GB of a node"))
    if best := account.best:
        rows.append((f"best {best['metric']}", f"{best['value']:.5g} at step {best['step']:,}"))
    return rows


def _costs(costs: dict[str, float], account: RunAccount) -> Iterable[str]:
    units = {"seconds": "s", "gpu_hours": "GPU-hours", "kwh": "kWh"}
    if account.cost is not None:
        units["cost"] = account.cost[1]
    for name, value in costs.items():
        if value or name == "seconds":
            yield f"{value:.3g} {units[name]}"


def _attempts(account: RunAccount) -> Table:
    heads = ("  attempt", "state", "steps", "time", "lost", "hosts", "why it ended")
    table = Table(*heads, right=(0, 2, 3, 4))
    for span in account.spans:
        table.add_row(
            str(span.number),
            span.state,
            span.steps,
            duration(span.seconds),
            duration(span.parts["lost"]),
            few(account.hosts(span), 3),
            why(span),
        )
    return table


def _list(title: str, texts: list[str]) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), _bullets(texts)] if texts else []


def _bullets(texts: Iterable[str]) -> Table:
    """Return a list whose further lines are indented."""
    table = Table("", "", gap=1)
    for text in texts:
        table.add_row("  *", text)
    return table


def show_sweep(
    accounts: Sequence[RunAccount], sweep: Sweep, search: Standing | None = None
) -> RenderableType:
    """Return the report of several runs, or of a search."""
    parts: list[RenderableType] = [_totals(accounts), Text()]
    if search:
        parts += [*search.shown(_TRIALS), Text(), _bullets(search_trials.said(search))]
    else:
        parts.append(_best(sweep))
    if not search and (importance := sweep.importance()):
        parts += [Text(), Text(f"Variance of {sweep.metric} explained alone", style="bold")]
        shares = ((key, f"{100 * share:.1f}%") for key, share in importance.items())
        parts.append(_rows(shares, right=(1,)))
    if sweep.others:
        parts += [Text(), Text("Without a result", style="bold")]
        parts.append(_rows((each.name, cause(each)) for each in sweep.others[:_FAILED]))
        if len(sweep.others) > _FAILED:
            parts.append(Text(f"  ... {len(sweep.others) - _FAILED} more (--json)"))
    return Group(*parts, *_list("Notes", shared_notes(accounts)))


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
        for name, reason in setting.missing.items():
            text = f"without {name} ({setting.label}): {reason}"
            parts.append(Text(Cell(text).plain, style="yellow"))
    return Group(*parts)
