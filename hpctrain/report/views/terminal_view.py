"""The report of one run on the terminal: bars as jobstats prints them, figures, and notes."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from hpctrain.console import Cell, Table
from hpctrain.report.account.advice import notes
from hpctrain.report.account.run_account import RunAccount
from hpctrain.report.account.standing import why
from hpctrain.report.account.time_parts import PARTS
from hpctrain.runs.state.state import duration
from hpctrain.terminal import few

_BAR = 20  # characters; a line fits into 60
TITLES = {
    "compute": "compute",
    "communication": "communication",
    "data_wait": "wait for data",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "startup": "start-up",
    "compile": "compile",
    "restart": "start-up again",
    "lost": "lost steps",
    "slow_rank": "slow rank",
    "idle": "no program",
    "shutdown": "shutdown",
    "other": "other",
    "unknown": "unknown",
}


def show(account: RunAccount) -> RenderableType:
    """Return the report of a run."""
    parts: list[RenderableType] = [_head(account)]
    if account.spans:
        parts += [Text(), *_bars(account), Text(), _figures(account)]
        if len(account.spans) > 1:
            parts += [Text(), _attempts(account)]
    parts += _list("Profile", account.profile)
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
    time = account.time
    for name in PARTS:
        share = time[name] / time["allocated"] if time["allocated"] else 0.0
        if time[name] >= 0.0005:
            yield _bar(TITLES[name], share, duration(time[name]))
    usage = account.usage
    used = usage.mean(usage.of_gpus("utilization_percentage").values())
    memory = usage.peak(usage.of_gpus("memory_usage_percentage").values())
    cores = usage.mean(usage.of_nodes("cpu_utilization_percentage").values())
    loads = (("GPU use", used), ("GPU memory", memory), ("cores", cores))
    found = [(title, value) for title, value in loads if value is not None]
    if found:
        yield Text()
    for title, value in found:
        yield _bar(title, value / 100, "")


def _bar(title: str, share: float, text: str) -> Text:
    filled = round(_BAR * min(1.0, max(0.0, share)))
    drawn = "|" * filled + " " * (_BAR - filled)
    return Text(f"  {title:<15}[{drawn}{100 * share:5.1f}%]  {text}".rstrip())


def _figures(account: RunAccount) -> Table:
    table = Table("", "")
    for name, value in figures(account):
        table.add_row(f"  {name}", value)
    return table


def figures(account: RunAccount) -> list[tuple[str, str]]:
    """Return the figures of a run as rows of a name and a text; what is unknown is left out."""
    rows = [("allocated", duration(account.time["allocated"]))]
    if account.queue_s is not None and account.queue_s > 0:
        rows.append(("in the queue", duration(account.queue_s)))
    if account.goodput is not None:
        rows.append(("goodput", f"{100 * account.goodput:.1f}%"))
    if account.gpu_hours:
        idle = account.usage.idle_gpu_hours(float(account.value("monitor.idle_percent", 5.0)))
        more = f", of which idle {idle:.3g}" if idle is not None else ""
        rows.append(("GPU-hours", f"{account.gpu_hours:.3g}{more}"))
    else:
        rows.append(("core-hours", f"{account.core_hours:.3g}"))
    if (kwh := account.kwh) is not None:
        rows.append(("energy", f"{kwh:.3g} kWh"))
    if account.cost is not None:
        rows.append(("cost", f"{account.cost[0]:.2f} {account.cost[1]}"))
    for what, costs in account.per.items():
        label = "per point (0.01)" if what == "point" else f"per {what}"
        rows.append((label, ", ".join(_costs(costs, account))))
    if account.gpu_memory_gib is not None:
        rows.append(("peak GPU memory", f"{account.gpu_memory_gib:.1f} GiB"))
    memory = account.usage.peak(account.usage.of_nodes("system_memory_usage_megabytes").values())
    if memory is not None:
        rows.append(("peak memory", f"{memory / 1000:.2f} GB of a node"))
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
        state = span.facts.state or ("running" if span.runs else "killed")
        hosts = account.hosts(span)
        table.add_row(
            str(span.number),
            str(state),
            f"{span.first_step:,}-{span.reached:,}",
            duration(span.seconds),
            duration(span.parts["lost"]),
            few(hosts, 3),
            why(span),
        )
    return table


def _list(title: str, texts: list[str]) -> list[RenderableType]:
    if not texts:
        return []
    return [Text(), Text(title, style="bold"), bullets(texts)]


def bullets(texts: Iterable[str]) -> Table:
    """Return a list whose further lines are indented."""
    table = Table("", "", gap=1)
    for text in texts:
        table.add_row("  *", text)
    return table
