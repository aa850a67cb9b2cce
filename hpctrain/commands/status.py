"""`python -m hpctrain status [RUN|SWEEP...]`: where the runs are."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from hpctrain.commands.facts import Facts, gather
from hpctrain.commands.select import add_arguments, select
from hpctrain.commands.state import STATES, UNDER_WAY, State, duration, eta_s, judge, metric, step

_ROWS = 40
_COLUMNS = ("run", "state", "reason", "node", "restarts", "step", "ETA", "metric")
_REASON_LEAST = 20  # it is folded, to no less
_REASON = 100  # characters; --json has all of it, and logs more
_COLOURS = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "lost": "red",
    "damaged": "red",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "requeued": "yellow",
}


@dataclass(frozen=True)
class Row:
    """One run of the table."""

    run: Facts
    state: State
    time: float

    @property
    def node(self) -> str:
        """Where it runs or ran last: a Slurm hostlist, or the hosts themselves."""
        if self.run.job is not None and self.run.job.nodes:
            return self.run.job.nodes
        if self.run.ended is not None and self.run.ended.nodes != "None assigned":
            return self.run.ended.nodes
        hosts: list[str] = self.run.attempt.get("hosts", [])
        more = f" +{len(hosts) - 2}" if len(hosts) > 2 else ""
        return ",".join(hosts[:2]) + more

    @property
    def eta_s(self) -> float | None:
        """Seconds that a run which trains still needs."""
        return eta_s(self.run, self.time) if self.state.name == "running" else None

    def cells(self) -> list[Text]:
        """Text, for a name or an error may look like rich's markup."""
        made, left, watched = step(self.run), self.eta_s, metric(self.run)
        total, reason = self.run.progress.get("max_steps"), self.state.reason
        steps = "" if made is None else f"{made}" if total is None else f"{made}/{total}"
        return [
            Text(self.run.name, no_wrap=True),
            Text(self.state.name, style=_COLOURS.get(self.state.name, ""), no_wrap=True),
            Text(reason if len(reason) <= _REASON else reason[: _REASON - 1] + "…"),
            Text(self.node),
            Text(str(self.run.restarts or "")),
            Text(steps, no_wrap=True),
            Text("" if left is None else duration(left), no_wrap=True),
            Text("" if watched is None else f"{watched[0]} {watched[1]:.4g}", no_wrap=True),
        ]

    def facts(self) -> dict[str, Any]:
        """For programs."""
        values = {**self.run.progress.get("metrics", {}), **(self.run.record.get("result") or {})}
        values.pop("step", None)
        watched = metric(self.run)
        return {
            "run": str(self.run.path),
            "state": self.state.name,
            "reason": self.state.reason,
            "job_id": self.run.job_id,
            "nodes": self.node,
            "restarts": self.run.restarts,
            "step": step(self.run),
            "max_steps": self.run.progress.get("max_steps"),
            "eta_s": self.eta_s,
            "metric": None if watched is None else watched[0],
            # JSON knows no NaN.
            "metrics": {k: v if math.isfinite(v) else None for k, v in values.items()},
        }


def main(argv: list[str]) -> int:
    """Print the table, once or again and again."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status",
        description="Show where runs are: state and reason, node, restarts, step, time left, last "
        "metric. Reads the run directories and asks squeue once, and sacct where a job has gone.",
        epilog="States: " + ", ".join(STATES),
    )
    add_arguments(parser, "default: all")
    parser.add_argument("--all", action="store_true", help="every row, archived runs as well")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=10.0,
        metavar="SECONDS",
        help="again every 10 (or so many) seconds, until no run is queued or running; "
        "Ctrl-C ends it",
    )
    options = parser.parse_args(argv)
    try:
        if options.watch is None:
            _show(options, look(options))
        else:
            _watch(options)
    except KeyboardInterrupt:
        if options.watch is None:
            raise
    return 0


def look(options: argparse.Namespace) -> list[Row]:
    """Read the runs and ask the scheduler, now."""
    runs = gather(select(options.dir, options.runs, archived=options.all))
    now = time.time()
    return [Row(run, judge(run, now), now) for run in runs]


def _watch(options: argparse.Namespace) -> None:
    console = _console()
    if options.json or not console.is_terminal:
        while True:
            rows = look(options)
            _show(options, rows)
            if not any(row.state.name in UNDER_WAY for row in rows):
                return
            time.sleep(options.watch)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            rows = look(options)
            table = _table(rows, _where(options), console.width, everything=options.all)
            live.update(table, refresh=True)
            if not any(row.state.name in UNDER_WAY for row in rows):
                return
            time.sleep(options.watch)


def _show(options: argparse.Namespace, rows: list[Row]) -> None:
    if options.json:
        print(json.dumps([row.facts() for row in rows]), flush=True)
    else:
        console = _console()
        console.print(_table(rows, _where(options), console.width, everything=options.all))


def _table(rows: list[Row], where: str, width: int, *, everything: bool) -> Group:
    counts = Counter(row.state.name for row in rows)
    told = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    clock = time.strftime("%H:%M:%S")
    many = "run" if len(rows) == 1 else "runs"
    head = Text(f"{len(rows)} {many}{where}, {clock}" + (f": {told}" if told else ""))
    shown, note = rows, Text("")
    if len(rows) > _ROWS and not everything:
        order = {name: place for place, name in enumerate(STATES)}
        shown = sorted(rows, key=lambda row: order[row.state.name])[:_ROWS]
        note = Text(f"… {len(rows) - _ROWS} more (--all, --json)")
    cells = [row.cells() for row in shown]
    kept, reason = _fitting(cells, width), _COLUMNS.index("reason")
    table = Table(*(Column(_COLUMNS[n], no_wrap=n != reason, overflow="fold") for n in kept))
    for row in cells:
        table.add_row(*(row[n] for n in kept))
    return Group(head, *([table] if shown else []), *([note] if note else []))


def _where(options: argparse.Namespace) -> str:
    # Those that are named may lie anywhere.
    return "" if options.runs else f" in {options.dir}"


def _fitting(rows: list[list[Text]], width: int) -> list[int]:
    """The columns that a terminal has room for: names are there to be copied, so never cut."""
    widths = [
        max([len(title), *(row[n].cell_len for row in rows)]) for n, title in enumerate(_COLUMNS)
    ]
    reason = _COLUMNS.index("reason")
    widths[reason] = min(widths[reason], _REASON_LEAST)
    kept = list(range(len(_COLUMNS)))
    # --json has all of them.
    for title in ("restarts", "node", "metric", "ETA", "step"):
        if 1 + sum(widths[n] + 3 for n in kept) > width:
            kept.remove(_COLUMNS.index(title))
    return kept


def _console() -> Console:
    """On a terminal as wide as that is; in a file or a pipe no cell is folded."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def _seconds(text: str) -> float:
    try:
        return max(2.0, float(text))  # be kind to the controller
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of seconds; a run's name comes first: status {text} --watch"
        ) from None
