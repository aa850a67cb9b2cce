"""`python -m hpctrain status [RUN|SWEEP...]`: show a table of runs and their states."""

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
from hpctrain.tracking.left import left_behind
from hpctrain.tracking.meta import Uploaded

_ROWS = 40
_PROBLEMS = 3  # lines about uploads
_COLUMNS = ("run", "state", "reason", "node", "restarts", "step", "ETA", "metric")
_REASON_LEAST = 12  # the smallest width of the reason, which is folded
_REASON = 100  # characters of the reason in the table; --json has all of it, logs even more
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
    """One row of the table: a run and its state at a time, in seconds since the epoch."""

    run: Facts
    state: State
    time: float

    @property
    def node(self) -> str:
        """Where the run runs or ran last: a Slurm hostlist, or a list of hosts."""
        if self.run.job is not None and self.run.job.nodes:
            return self.run.job.nodes
        if self.run.ended is not None and self.run.ended.nodes != "None assigned":
            return self.run.ended.nodes
        hosts: list[str] = self.run.attempt.get("hosts", [])
        more = f" +{len(hosts) - 2}" if len(hosts) > 2 else ""
        return ",".join(hosts[:2]) + more

    @property
    def eta_s(self) -> float | None:
        """The seconds that a running run still needs; None if unknown."""
        return eta_s(self.run, self.time) if self.state.name == "running" else None

    @property
    def upload_problem(self) -> str:
        """Why the uploader cannot upload, with the cure; "" if nothing is known."""
        note = Uploaded.read(self.run.path)
        if note is None or not note.problem:
            return left_behind(self.run.path) if self.state.name == "finished" else ""
        if self.state.name == "running":
            return note.problem
        return f"{note.problem}; then `python -m hpctrain sync {self.run.path}` uploads the rest"

    def cells(self, metric_name: str = "") -> list[Text]:
        """Return the cells, one for each of _COLUMNS; the metric without `metric_name`."""
        done, left, main_metric = step(self.run), self.eta_s, metric(self.run)
        total, reason = self.run.progress.get("max_steps"), self.state.reason
        steps = "" if done is None else f"{done}" if total is None else f"{done}/{total}"
        # Text, because a name or an error may look like rich's markup.
        return [
            Text(self.run.name, no_wrap=True),
            Text(self.state.name, style=_COLOURS.get(self.state.name, ""), no_wrap=True),
            Text(reason if len(reason) <= _REASON else reason[: _REASON - 1] + "…"),
            Text(self.node),
            Text(str(self.run.restarts or "")),
            Text(steps, no_wrap=True),
            Text("" if left is None else duration(left), no_wrap=True),
            Text(_metric(main_metric, metric_name), no_wrap=True),
        ]

    def facts(self) -> dict[str, Any]:
        """Return the row for --json."""
        values = {**self.run.progress.get("metrics", {}), **(self.run.record.get("result") or {})}
        values.pop("step", None)
        main_metric = metric(self.run)
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
            "upload_problem": self.upload_problem,
            "metric": None if main_metric is None else main_metric[0],
            # JSON has no NaN.
            "metrics": {k: v if math.isfinite(v) else None for k, v in values.items()},
        }


def _metric(found: tuple[str, float] | None, title: str) -> str:
    if found is None:
        return ""
    name, value = found
    return f"{value:.4g}" if name == title else f"{name} {value:.4g}"


def main(argv: list[str]) -> int:
    """Print the table, once or with --watch again and again; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status",
        description="Show a table of runs: state and reason, node, restarts, step, time left, last "
        "metric. It reads the run directories, calls squeue once, and calls sacct if a job has "
        "left the queue.",
        epilog="States: " + ", ".join(STATES),
    )
    add_arguments(parser, "default: all")
    parser.add_argument(
        "--all", action="store_true", help="show every row, and archived runs as well"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=10.0,
        metavar="SECONDS",
        help="repeat every SECONDS (default: 10) until no run is queued or running any more; if "
        "none is yet, wait for the first one (on a terminal); Ctrl-C ends it",
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
    """Read the runs and ask the scheduler."""
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
    begun = False
    with Live(console=console, auto_refresh=False) as live:
        while True:
            there = bool(options.runs) or options.dir.exists()  # the first run makes the folder
            rows = look(options) if there else []
            table = _table(rows, _where(options), console.width, everything=options.all)
            under_way = any(row.state.name in UNDER_WAY for row in rows)
            begun |= under_way or bool(options.runs)
            what = "nothing is queued or running" if there else f"there is no folder {options.dir}"
            note = [] if begun else [Text(f"{what} yet; Ctrl-C ends this")]
            live.update(Group(table, *note), refresh=True)
            if begun and not under_way:
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
    summary = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    clock = time.strftime("%H:%M:%S")
    noun = "run" if len(rows) == 1 else "runs"
    head = Text(f"{len(rows)} {noun}{where}, {clock}" + (f": {summary}" if summary else ""))
    shown, note = rows, Text("")
    if len(rows) > _ROWS and not everything:
        order = {name: place for place, name in enumerate(STATES)}
        shown = sorted(rows, key=lambda row: order[row.state.name])[:_ROWS]
        note = Text(f"… {len(rows) - _ROWS} more (--all, --json)")
    # A metric that all runs share is named once, in the title.
    names = {found[0] for row in shown if (found := metric(row.run)) is not None}
    titles = [*_COLUMNS[:-1], names.pop() if len(names) == 1 else _COLUMNS[-1]]
    cells = [row.cells(titles[-1]) for row in shown]
    kept, reason = _fitting(titles, cells, width), _COLUMNS.index("reason")
    table = Table(*(Column(titles[n], no_wrap=n != reason, overflow="fold") for n in kept))
    for row in cells:
        table.add_row(*(row[n] for n in kept))
    problems = [(row.run.name, text) for row in shown if (text := row.upload_problem)]
    lines = [Text(f"{name}: {text}", style="yellow") for name, text in problems[:_PROBLEMS]]
    if len(problems) > _PROBLEMS:
        lines.append(Text(f"… {len(problems) - _PROBLEMS} more runs have such a problem (--json)"))
    return Group(head, *([table] if shown else []), *([note] if note else []), *lines)


def _where(options: argparse.Namespace) -> str:
    # Runs that are named may be in any folder.
    return "" if options.runs else f" in {options.dir}"


def _fitting(titles: list[str], rows: list[list[Text]], width: int) -> list[int]:
    """Return the columns that fit into the terminal. Names are never cut, so they can be copied."""
    widths = [
        max([len(title), *(row[n].cell_len for row in rows)]) for n, title in enumerate(titles)
    ]
    reason = _COLUMNS.index("reason")
    widths[reason] = min(widths[reason], _REASON_LEAST)
    kept = list(range(len(titles)))
    # Columns are left out in this order, empty ones first; --json has all of them.
    order = [_COLUMNS.index(name) for name in ("restarts", "node", "ETA", "step", "metric")]
    empty = [n for n in (*order, reason) if not any(row[n].plain for row in rows)]
    for n in [*empty, *(n for n in order if n not in empty)]:
        if 1 + sum(widths[n] + 3 for n in kept) > width:
            kept.remove(n)
    return kept


def _console() -> Console:
    """Return a console as wide as the terminal; for a file or pipe, one that folds nothing."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


def _seconds(text: str) -> float:
    try:
        return max(2.0, float(text))  # more frequent calls would be a load for the controller
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of seconds; give the run first: status {text} --watch"
        ) from None
