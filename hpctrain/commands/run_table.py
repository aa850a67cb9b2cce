"""The table of runs that `hpctrain status` shows, and the lines below it."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from hpctrain.base import offered
from hpctrain.base.terminal.console import Cell, Table, shortened
from hpctrain.base.units import duration
from hpctrain.commands.facts import Facts
from hpctrain.commands.state import STATES, State, best, eta_s, metric, step
from hpctrain.runs.code import trained_code
from hpctrain.runs.sweep_overrides import label
from hpctrain.tracking import samples
from hpctrain.tracking.meta import Uploaded, left_behind

_PROBLEMS = 3
"""The most lines about uploads and the like."""
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
    def swept(self) -> str:
        """The values of the run that a sweep has given."""
        return label(self.run.record.swept)

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

    @property
    def waste(self) -> str:
        """Which of its GPUs do nothing now, as its monitors have told, or what was not needed."""
        if self.state.name == "finished":
            return self.run.attempt.waste
        told = samples.idle(self.run.path).values() if self.state.name == "running" else ()
        since = [when for when, _ in told if when >= self.run.attempt.started]
        return offered.right_size.waste(self.run.path, min(since), self.time) if since else ""

    def facts(self) -> dict[str, Any]:
        """Return the row for --json."""
        return {column.name: column.value(self) for column in _COLUMNS}


class _Column(NamedTuple):
    """One thing that `status` tells of a run, in --json and perhaps to people."""

    name: str  # in --json
    value: Callable[[Row], Any]
    heading: str = ""  # "": only --json has it
    shown: Callable[[Row], str] | None = None  # as its value, if it is not given
    # The turn in which it is left out where the terminal is narrow; what is worth the least leaves
    # first, and 0 never.
    leaves: int = 0

    def cell(self, row: Row, shared: str) -> Cell:
        """Return its cell in a row; the metric without the name `shared`."""
        text = self.shown(row) if self.shown else str(self.value(row) or "")
        text = text.removeprefix(f"{shared} ") if self.name == "metric" else text
        style = _COLOURS.get(row.state.name, "") if self.name == "state" else ""
        return Cell(text, style, no_wrap=True)  # a name or an error may be a stranger's


def _time(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _steps(row: Row) -> str:
    done, total = step(row.run), row.run.progress.max_steps
    return "" if done is None else f"{done}" if total is None else f"{done}/{total}"


def _metric(row: Row) -> str:
    found = metric(row.run)
    return "{} {:.4g}".format(*found) if found else ""


def _best(row: Row) -> str:
    found = best(row.run)
    return "" if found is None else f"{found[0]:.4g}"


def _best_value(row: Row) -> dict[str, float] | None:
    found = best(row.run)
    return None if found is None else {"value": found[0], "step": found[1]}


# In the order in which they are shown.
_COLUMNS = (
    _Column("run", lambda row: str(row.run.path), "run", lambda row: row.run.name),
    _Column("swept", lambda row: row.run.record.swept, "swept", lambda row: row.swept, 4),
    _Column("state", lambda row: row.state.name, "state"),
    _Column("reason", lambda row: row.state.reason),
    _Column("cause", lambda row: row.run.attempt.cause),  # of the end of the last attempt
    _Column("job_id", lambda row: row.run.job_id),
    _Column("nodes", lambda row: row.node, "node", leaves=2),
    _Column("restarts", lambda row: row.run.restarts, "restarts", leaves=1),
    _Column("duration_s", lambda row: row.trained_s, "time", lambda row: _time(row.trained_s), 5),
    _Column("step", lambda row: step(row.run), "step", _steps, 6),
    _Column("max_steps", lambda row: row.run.progress.max_steps),
    _Column("eta_s", lambda row: row.eta_s, "ETA", lambda row: _time(row.eta_s), 7),
    _Column("upload_problem", lambda row: row.upload_problem),
    _Column("waste", lambda row: row.waste),
    _Column("changed_code", lambda row: row.changed_code),
    _Column("metric", lambda row: (metric(row.run) or (None,))[0], "metric", _metric, 3),
    _Column("best", _best_value, "best", _best, 8),
    _Column("metrics", lambda row: row.run.metrics),
)
_SHOWN = [column for column in _COLUMNS if column.heading]


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
    titles = [each.heading for each in _SHOWN]
    if shared:
        titles[titles.index("metric")] = "last"
    leaving = sorted((each.leaves, n) for n, each in enumerate(_SHOWN) if each.leaves)
    drawn = Table(*titles, first_out=[n for _, n in leaving])
    for row in shown:
        drawn.add_row(*(each.cell(row, shared) for each in _SHOWN))
    told = _reasons(shown, swept=titles.index("swept") not in drawn.shown(width))
    lines = [*told, *problems(shown)]
    ends = (f": {summary}" if summary else "") + (f"; metric: {shared}" if shared else "")
    head = Cell(f"{len(rows)} {noun}{where}, {clock}{ends}")
    return Group(head, *([drawn] if shown else []), *([note] if note else []), *lines)


def problems(rows: list[Row]) -> list[Text]:
    """Return a line for each of the first problems that a run has beside its state."""
    kinds = ("upload_problem", "waste", "changed_code")
    found = [(r.run.name, text) for kind in kinds for r in rows if (text := getattr(r, kind))]
    lines: list[Text] = [Cell(f"{run}: {text}", "yellow") for run, text in found[:_PROBLEMS]]
    if len(found) > _PROBLEMS:
        lines.append(Text(f"… {len(found) - _PROBLEMS} more runs have such a problem (--json)"))
    return lines


def _reasons(rows: list[Row], *, swept: bool) -> list[Text]:
    """Return a line for each run with a reason, the urgent first; others alike share a line."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.state.name not in _URGENT):
        values = row.swept if swept else ""
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
