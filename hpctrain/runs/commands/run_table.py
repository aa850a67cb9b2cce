"""The table of runs that `hpctrain status` shows, and the lines below it."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from hpctrain.base.terminal.console import Cell, Table, shortened
from hpctrain.base.units import duration
from hpctrain.runs.code import trained_code
from hpctrain.runs.state.facts import Facts
from hpctrain.runs.state.state import STATES, State, best, eta_s, metric, step
from hpctrain.runs.sweep_overrides import label
from hpctrain.tracking.meta import Uploaded
from hpctrain.tracking.pending_upload import left_behind

_PROBLEMS = 3
"""The most lines about uploads and the like."""
_COLUMNS = (
    *("run", "swept", "state", "node", "restarts", "time", "step", "ETA"),
    *("metric", "best"),
)
# What is worth the least is left out first where the terminal is narrow; --json has all of it.
_FIRST_OUT = ("restarts", "node", "metric", "swept", "time", "step", "ETA", "best")
_URGENT = ("failed", "lost", "damaged", "cancelled")
_REASON = 300  # characters of a reason
_COLOURS = {
    "finished": "green",
    "running": "cyan",
    "failed": "red",
    "lost": "red",
    "damaged": "red",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "paused": "yellow",
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
        attempt = self.run.attempt
        # torchrun tells a rank only the number of nodes; rank 0 knows its own.
        hosts = attempt.hosts or (attempt.host,)
        more = max(len(hosts), attempt.nodes) - len(hosts[:2])
        return ",".join(hosts[:2]) + (f" +{more}" if more else "")

    @property
    def trained_s(self) -> float | None:
        """The seconds that all attempts have taken together; None if none has begun."""
        return self.run.trained_s(self.time if self.state.name == "running" else None)

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
        upload = f"`python -m hpctrain status --upload {self.run.path}`"
        return f"{note.problem}; then {upload} uploads the rest"

    @property
    def changed_code(self) -> str:
        """From which step on the run has trained with other code; "" if it has not."""
        turns = trained_code.turning_points(self.run.record).items()
        return "; ".join(f"other code from step {step} on: {what}" for step, what in turns)

    def cells(self, shared: str) -> list[Cell]:
        """Return the cells, one for each of _COLUMNS; the metric without the name `shared`."""
        done, left, took, main_metric = step(self.run), self.eta_s, self.trained_s, metric(self.run)
        value = "{} {:.4g}".format(*main_metric) if main_metric else ""
        found = best(self.run)
        total = self.run.progress.max_steps
        steps = "" if done is None else f"{done}" if total is None else f"{done}/{total}"
        # A name or an error may be a stranger's.
        return [
            Cell(self.run.name, no_wrap=True),
            Cell(label(self.run.record.swept), no_wrap=True),
            Cell(self.state.name, style=_COLOURS.get(self.state.name, ""), no_wrap=True),
            Cell(self.node, no_wrap=True),
            Cell(str(self.run.restarts or "")),
            Cell("" if took is None else duration(took), no_wrap=True),
            Cell(steps, no_wrap=True),
            Cell("" if left is None else duration(left), no_wrap=True),
            Cell(value.removeprefix(shared), no_wrap=True),
            Cell("" if found is None else f"{found[0]:.4g}", no_wrap=True),
        ]

    def facts(self) -> dict[str, Any]:
        """Return the row for --json."""
        values = {
            **self.run.progress.metrics,
            **(self.run.record.result or {}),
            **self.run.evaluated,
        }
        values.pop("step", None)
        main_metric, found = metric(self.run), best(self.run)
        return {
            "run": str(self.run.path),
            "swept": self.run.record.swept,
            "state": self.state.name,
            "reason": self.state.reason,
            "cause": self.run.attempt.cause,  # of the end of the last attempt
            "job_id": self.run.job_id,
            "nodes": self.node,
            "restarts": self.run.restarts,
            "step": step(self.run),
            "max_steps": self.run.progress.max_steps,
            "duration_s": self.trained_s,
            "eta_s": self.eta_s,
            "upload_problem": self.upload_problem,
            "changed_code": self.changed_code,
            "metric": None if main_metric is None else main_metric[0],
            "best": None if found is None else {"value": found[0], "step": found[1]},
            "metrics": values,
        }


def table(rows: list[Row], where: str, width: int, most: int) -> Group:
    """Return the table with its head, at most so many rows, the reasons and the notes."""
    counts = Counter(row.state.name for row in rows)
    summary = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    clock = time.strftime("%H:%M:%S")
    noun = "run" if len(rows) == 1 else "runs"
    # What runs comes first, then what needs attention, in each part the newest.
    shown = sorted(
        rows,
        key=lambda row: (
            row.state.name != "running",
            row.state.name not in _URGENT,
            -row.run.begun,
        ),
    )[:most]
    note = Text("")
    if len(rows) > most:
        note = Text(f"... {len(rows) - most} more (--all, --json)")
    # A metric that all runs share is named once, in the head.
    names = {found[0] for row in shown if (found := metric(row.run)) is not None}
    shared = names.pop() if len(names) == 1 else ""
    titles = ["last" if shared and title == "metric" else title for title in _COLUMNS]
    drawn = Table(*titles, first_out=[*map(_COLUMNS.index, _FIRST_OUT)])
    for row in shown:
        drawn.add_row(*row.cells(f"{shared} "))
    told = _reasons(shown, swept=_COLUMNS.index("swept") not in drawn.shown(width))
    lines = [*told, *problems(shown)]
    ends = (f": {summary}" if summary else "") + (f"; metric: {shared}" if shared else "")
    head = Cell(f"{len(rows)} {noun}{where}, {clock}{ends}")
    return Group(head, *([drawn] if shown else []), *([note] if note else []), *lines)


def problems(rows: list[Row]) -> list[Text]:
    """Return a line for each of the first problems that a run has beside its state."""
    kinds = ("upload_problem", "changed_code")
    found = [(r.run.name, text) for kind in kinds for r in rows if (text := getattr(r, kind))]
    lines: list[Text] = [Cell(f"{run}: {text}", "yellow") for run, text in found[:_PROBLEMS]]
    if len(found) > _PROBLEMS:
        lines.append(Text(f"… {len(found) - _PROBLEMS} more runs have such a problem (--json)"))
    return lines


def _reasons(rows: list[Row], *, swept: bool) -> list[Text]:
    """Return a line for each run with a reason, the urgent first; others alike share a line."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.state.name not in _URGENT):
        values = label(row.run.record.swept) if swept else ""
        if text := "; ".join(filter(None, (row.state.reason, values))):
            own = row.run.name if row.state.name in _URGENT else ""
            alike.setdefault((row.state.name, text, own), []).append(row)
    lines: list[Text] = []
    for (state, text, _), runs in alike.items():
        who = f"{runs[0].run.name}:" if len(runs) == 1 else f"{len(runs)} runs {state}:"
        style = "yellow" if runs[0].run.record.notes and state not in _URGENT else ""
        style = style or _COLOURS.get(state, "")  # what is wrong with a run is not green
        lines.append(Cell(f"{who} {shortened(text, _REASON)}", style))
    return lines
