"""One run of a sweep: its config, its directory, and what becomes of it.

OPEN ── set_states: it is finished, under way, given twice ── it stays as it is
└── submitted (QUEUED), over the submit limit (NO_ROOM), frozen to run here (FROZEN) ── ENDED
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from rich.progress import track

from hpctrain.base import secrets
from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.terminal.console import Console, Table, say
from hpctrain.cluster.slurm.queue import Queue, Task
from hpctrain.config.schema import Config
from hpctrain.launch.jobs import LocalRunJob, RunJob
from hpctrain.runs import sweep_overrides
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.shared_job import job_of

ROWS = 40  # longer tables are cut
T = TypeVar("T")


class Status(Enum):
    """What becomes of a run, and the words for it; `{}` is the detail of `Entry.mark`."""

    OPEN = ""
    TWICE = "the same run as above"
    DONE = "finished before"
    UNDER_WAY = "{} already"  # the state of its job
    ELSEWHERE = "running elsewhere"
    LEFT = "{} before"  # its recorded state; launch.rerun=none leaves it
    WOULD_QUEUE = "would be submitted"
    WOULD_RUN = "would run here"
    NO_ROOM = "no room yet"
    QUEUED = "queued"
    FROZEN = "frozen"
    ENDED = "{}"  # its recorded state


@dataclass
class Entry:
    """One run of a sweep."""

    overrides: list[str]  # those of the command line for this run
    config: Config  # typed and checked
    run: RunDir  # its directory need not exist yet
    # The code snapshot that the run uses; None: the code as it is when the job starts.
    code: Snapshot | None = None
    keeps_code: bool = False  # `code` is the snapshot of an earlier submission of the same run
    config_dir: str = ""  # that of the command
    # Overrides of the command that had made the run, to which `resume` adds some.
    earlier: list[str] = field(default_factory=list)
    # Overrides that distinguish the run from the others of its sweep.
    swept: list[str] = field(default_factory=list)
    # What run.json had when the sweep began; empty for a new run.
    before: RunRecord = field(default_factory=RunRecord)
    again: bool = False  # the run is finished and shall be repeated
    status: Status = Status.OPEN
    detail: str = ""  # of the status
    job: str = ""  # `ARRAYJOB_TASK`, as soon as the run is queued
    behind: Sequence[str] = ()  # the same of the jobs of its chain that wait behind it
    # The path of its script and its task number, as soon as these are written.
    task: Task | None = None
    # The job of submitit, if this process has submitted it.
    handle: RunJob | LocalRunJob | None = None

    @property
    def state(self) -> str:
        """The status in words, for the user."""
        return self.status.value.format(self.detail)

    def mark(self, status: Status, detail: str = "") -> None:
        """Set what becomes of the run."""
        self.status, self.detail = status, detail

    def read_end(self, otherwise: str = "") -> None:
        """Take the state that run.json has now; without one it is `otherwise`, or stays."""
        if state := self.run.read().state or otherwise:
            self.mark(Status.ENDED, state)

    def place_in(self, sweep: dict[str, str] | None) -> dict[str, Any]:
        """Return the uid and name of the sweep for run.json; a run keeps its first one."""
        if sweep is None or self.before.sweep is not None:
            return {}
        return {"sweep": sweep, **({"swept": self.swept} if self.swept else {})}

    def listed(self, known: Mapping[str, str]) -> dict[str, Any]:
        """Return its item of sweep.json; `known` are the secrets of the environment."""
        return {
            "run": str(self.run.path),
            "name": sweep_overrides.titled(self.run.name, self.swept),
            "swept": self.swept,
            "job": self.job,
            "state": self.state,
            "overrides": [secrets.reference(text, values=known) for text in self.overrides],
        }

    def metric(self) -> float | None:
        """Return the value of the metric `config.metric`; None while there is no result."""
        value = (self.run.read().result or {}).get(self.config.metric)
        return None if value is None else float(value)


def set_states(entries: list[Entry], jobs: Queue) -> None:
    """Mark the runs that need not be submitted: finished, under way, or given twice.

    The others are OPEN. A finished run that shall be repeated gets `again`. `before` of the runs
    must have been read after the queue.
    """
    seen: set[str] = set()
    for entry in entries:
        entry.mark(Status.OPEN)
        path = os.path.realpath(entry.run.path)
        record = entry.before
        state, rerun = record.state, entry.config.launch.rerun
        task, job = jobs.task_of(record), job_of(entry.run.path, record, jobs)
        if path in seen:
            entry.mark(Status.TWICE)
        elif state == "finished" and rerun != "all":
            entry.mark(Status.DONE)
        # A job that Slurm requeues is COMPLETING, like one that has ended, until it is PENDING.
        elif job and not (job.is_ending and state in ("failed", "finished")):
            entry.mark(Status.UNDER_WAY, job.state.lower())
            entry.job, entry.behind, entry.task = job.id, job.behind, task
        elif entry.run.is_locked():
            entry.mark(Status.ELSEWHERE)
        elif state == "finished":
            entry.again = True
        elif rerun == "none" and record.attempts:
            entry.mark(Status.LEFT, state)
        seen.add(path)


def runs(count: int) -> str:
    """Return the number with its noun: `1 run`, `2 runs`."""
    return f"{count:,} run" + ("s" if count != 1 else "")


def progress(items: Sequence[T]) -> Iterable[T]:
    """Iterate over `items`; show a progress bar if they are many and this is a terminal."""
    hidden = len(items) <= ROWS or not sys.stderr.isatty()
    console = Console(stderr=True)
    return track(items, "checking", console=console, disable=hidden, transient=True)


def show(entries: list[Entry]) -> None:
    """Print a table of the runs: name, overrides that not all have, state, job, and metric."""
    metrics = [entry.metric() for entry in entries]
    names = dict.fromkeys(
        entry.config.metric
        for entry, value in zip(entries, metrics, strict=True)
        if value is not None
    )
    table = Table("run", "overrides", "state", "job", *names)
    common = set.intersection(*(set(entry.overrides) for entry in entries))
    for entry, metric in list(zip(entries, metrics, strict=True))[:ROWS]:
        own = [text for text in entry.overrides if text not in common or len(entries) == 1]
        cells = [entry.run.name, secrets.mask(" ".join(own)), entry.state, entry.job]
        for name in names:
            mine = name == entry.config.metric and metric is not None
            cells.append(f"{metric:.4g}" if mine else "")
        table.add_row(*cells)
    Console(stderr=True).print(table)
    if len(entries) > ROWS:
        counts = Counter(entry.state.split(",")[0] or "checked" for entry in entries)
        listed = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        say(f"… and {len(entries) - ROWS:,} more; of all {len(entries):,}: {listed}")
