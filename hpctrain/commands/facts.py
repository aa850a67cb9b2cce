"""What is known about runs: their directories, one `squeue`, and one `sacct` where it is needed.

However many runs there are, the scheduler is asked once; not at all when every run is finished or
none was submitted to Slurm.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import LaunchError, StorageError
from hpctrain.launch.queue import Ended, Job, ended, queued
from hpctrain.runs import stop_request as stopfile
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)


@dataclass
class Facts:
    """One run, as its directory and the scheduler tell it.

    Attributes:
        path: of the run directory.
        record: content of run.json.
        progress: content of progress.json, which rank 0 writes every few seconds; may be empty.
        wish: who asked it to stop for good, and when.
        held: a process holds the directory, as far as this host can see.
        unanswered: it was submitted, but `sbatch` has not told a number yet, or never will.
        job_id: of the last submission or attempt, `ARRAYJOB_TASK`; "" outside Slurm.
        job: what `squeue` says.
        ended: what `sacct` says, where `squeue` says nothing.
        scheduler: whether `squeue` has answered: then what it does not know is not queued.
        damage: why run.json cannot be read.
    """

    path: Path
    record: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    wish: dict[str, Any] | None = None
    held: bool = False
    unanswered: bool = False
    job_id: str = ""
    job: Job | None = None
    ended: Ended | None = None
    scheduler: bool = False
    damage: str = ""

    @classmethod
    def read(cls, path: Path) -> Facts:
        """What the directory alone tells."""
        try:
            record = RunDir(path).read()
        except (StorageError, OSError) as error:
            return cls(path, damage=str(error))
        facts = cls(path, record, _json(path / "progress.json"))
        if not facts.is_final:
            facts.wish = stopfile.read(path, since=facts.submission.get("time", 0.0))
        array = _array_id(facts.submission["script"]) if facts.submission else ""
        facts.unanswered = bool(facts.submission) and not array
        task = facts.submission.get("task")
        facts.job_id = f"{array}_{task}" if array else str(facts.attempt.get("job_id", ""))
        return facts

    @property
    def name(self) -> str:
        """For people."""
        return self.path.name

    @property
    def said(self) -> str:
        """The state that run.json tells."""
        return str(self.record.get("state", "created"))

    @property
    def is_final(self) -> bool:
        """Whether no scheduler needs to be asked."""
        return self.said == "finished" or bool(self.damage)

    @property
    def submission(self) -> dict[str, Any]:
        """Script, task, user and time of the last submission to Slurm; empty without one."""
        return self.record.get("submission") or {}

    @property
    def attempt(self) -> dict[str, Any]:
        """The last attempt; empty when none has begun."""
        attempts = self.record.get("attempts") or [{}]
        last: dict[str, Any] = attempts[-1]
        return last

    def forget_old_submission(self) -> None:
        """What became of a job says nothing of a run that was taken up outside Slurm since."""
        begun = float(self.attempt.get("started", 0.0))
        here = self.attempt.get("launcher", "slurm") != "slurm"
        if here and begun > float(self.submission.get("time", 0.0)):
            self.record["submission"], self.job_id, self.scheduler = None, "", False

    @property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, len(self.record.get("attempts", [])) - 1)


def gather(paths: Iterable[Path]) -> list[Facts]:
    """Read the runs and ask the scheduler about those that may be queued, running or just gone."""
    _array_id.cache_clear()
    runs = [Facts.read(path) for path in paths]
    answers = True
    if any(run.submission and not run.is_final for run in runs) and shutil.which("squeue"):
        try:
            _ask_squeue(runs)
        except LaunchError as error:
            log.warning("%s This is what the run directories tell.", error)
            answers = False
    gone = []
    for run in runs:
        if run.job is None:
            run.forget_old_submission()
        if run.job is None and run.said in ("queued", "running", "interrupted"):
            run.held = RunDir(run.path).is_locked()
            if run.job_id and not run.held:
                gone.append(run)
    if gone and answers and shutil.which("sacct"):
        tasks = ended({run.job_id.partition("_")[0] for run in gone}) or {}
        for run in gone:
            run.ended = tasks.get(run.job_id)
    return runs


def _ask_squeue(runs: list[Facts]) -> None:
    open_runs = [run for run in runs if run.submission and not run.is_final]
    jobs = queued({str(run.submission["user"]) for run in open_runs})
    for index, run in enumerate(runs):
        if not run.submission or run.is_final:
            continue
        job = jobs.get((run.submission["script"], run.submission["task"]))
        if job is None:
            # It may have ended between our two looks: then run.json says so by now.
            run = runs[index] = Facts.read(run.path)
        run.job, run.scheduler = job, True
        run.job_id = job.id if job else run.job_id


@functools.cache
def _array_id(script: str) -> str:
    """The number that `sbatch` gave this script; a sweep's runs share the file."""
    try:
        return Path(script).with_name("job_id").read_text().strip()
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
