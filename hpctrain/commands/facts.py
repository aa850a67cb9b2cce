"""Gather the facts about runs: from their directories, from `squeue`, and if needed from `sacct`.

Each of the two commands is called once for all runs. `squeue` is not called if every run is
finished or none was submitted to Slurm.
"""

from __future__ import annotations

import functools
import logging
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hpctrain.base.errors import DamageError, LaunchError
from hpctrain.base.files.disk import is_own, open_regular
from hpctrain.base.names.run_record import AttemptRecord, Hang, Progress, RunRecord, Submission
from hpctrain.cluster.slurm.queue import Ended, Job, ended, queue_of
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request, verdict
from hpctrain.runs.state.shared_job import job_of
from hpctrain.runs.state.stop_request import StopRequest
from hpctrain.tracking.journal import journal_path, last_record

log = logging.getLogger(__name__)


@dataclass
class Facts:
    """What the run directory and the scheduler say about one run."""

    path: Path  # the run directory
    record: RunRecord = field(default_factory=RunRecord)  # of run.json
    # Of progress.json, which rank 0 writes every few seconds.
    progress: Progress = field(default_factory=Progress)
    stop_request: StopRequest | None = None  # who has asked the run to stop for good, and when
    restarted: str = ""  # how much of its budget of restarts it has spent; "" for nothing
    held: bool = False  # a process holds the lock of the run, as far as this host can see
    died_here: bool = False  # its process was one of this host, and is no more
    # The last step in the journal and of the checkpoints, where progress.json may be older.
    left_at: int | None = None
    unanswered: bool = False  # the run was submitted, but `sbatch` has not printed a job id
    job_id: str = ""  # of the last submission or attempt, `ARRAYJOB_TASK`; "" outside Slurm
    chain: tuple[str, ...] = ()  # the array ids of the last submission; several are a chain
    job: Job | None = None  # as `squeue` shows it; None if it is not in the queue
    ended: Ended | None = None  # as `sacct` shows it, if it is not in the queue
    scheduler: bool = False  # `squeue` has answered; then a job that it does not show is not queued
    hang: Hang | None = None  # which rank of the last attempt has not got on
    damage: str = ""  # why run.json or progress.json cannot be read; "" if they can

    @classmethod
    def read(cls, path: Path) -> Facts:
        """Return the facts that the run directory has, without the scheduler."""
        try:
            facts = cls(path, RunRecord.of(path), Progress.of(path))
        except DamageError as error:
            return cls(path, damage=str(error))
        if not facts.is_final:
            facts.hang = Hang.of(path, facts.attempt.key, facts.attempt.started)
            facts.stop_request = stop_request.read(path, since=facts.record.submitted)
        if verdict.restarts(facts.record, 0):  # else no checkpoint is looked at
            facts.restarted = verdict.restarts(facts.record, RunDir(path).last_checkpoint())
        submission = facts.submission
        facts.chain = _array_ids(submission.script) if submission else ()
        facts.unanswered = submission is not None and not facts.chain
        facts.job_id = facts.attempt.job_id
        if submission and facts.chain and facts.job_id.partition("_")[0] not in facts.chain:
            facts.job_id = f"{facts.chain[0]}_{submission.task}"
        return facts

    def look_at_the_end(self) -> None:
        """Read how a run stands that nobody trains, although it may not have told its end."""
        here = self.attempt.host == socket.gethostname() and is_own(self.path)
        gone = not Path("/proc", str(self.attempt.pid)).exists()
        self.died_here = here and gone and not self.held
        last = last_record(journal_path(self.path), "step")
        of_attempt = last is not None and last["time"] >= self.attempt.started > 0
        known = RunDir(self.path).last_checkpoint(), last["step"] if last and of_attempt else 0
        self.left_at = max(known) or None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric; those of the result count."""
        values = {**self.progress.metrics, **(self.record.result or {})}
        values.pop("step", None)
        return values

    @property
    def link(self) -> str:
        """The place of the job in its chain, such as "link 2 of 3"; "" without a chain."""
        array, jobs = self.job_id.partition("_")[0], self.chain
        known = len(jobs) > 1 and array in jobs
        return f"link {jobs.index(array) + 1} of {len(jobs)}" if known else ""

    @property
    def jobs(self) -> list[str]:
        """The jobs of Slurm in which it was trained, and that of the last submission."""
        used = [each.job_id for each in self.record.attempts if each.launcher == "slurm"]
        return [job for job in [*used, self.job_id] if job]

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.path.name

    @property
    def recorded_state(self) -> str:
        """The state in run.json. It is wrong if a process was killed after it wrote it."""
        return self.record.state or "created"

    @property
    def is_final(self) -> bool:
        """Whether the state is clear without the scheduler."""
        return self.recorded_state == "finished" or bool(self.damage)

    @property
    def submission(self) -> Submission | None:
        """The script, task, user and time of the last submission to Slurm; None without one."""
        return self.record.submission

    @property
    def attempt(self) -> AttemptRecord:
        """The last attempt; an empty one when none has begun."""
        return self.record.attempt

    def forget_old_submission(self) -> None:
        """Clear the submission if the run was started outside Slurm after it."""
        if self.record.is_outside_slurm:
            self.record, self.job_id = replace(self.record, submission=None), ""
            self.scheduler = False

    @property
    def begun(self) -> float:
        """When the run was last started or submitted, in seconds since the epoch; 0 if never."""
        return max(self.attempt.started, self.record.submitted)

    def trained_s(self, now: float | None, *, all_ranks: bool = False) -> float | None:
        """Return the seconds of all attempts together, or of all ranks; None if none has begun.

        Give the time, `now`, for a run that is running. An attempt that could not note its end has
        lasted until its last sign of life, which the next attempt has noted.
        """
        attempts = [each for each in self.record.attempts if each.started]
        total = 0.0
        for attempt in attempts:
            end = attempt.ended or attempt.seen
            if end is None and attempt is attempts[-1]:
                end = now or RunDir(self.path).last_sign(self.progress)
            seconds = max(0.0, (end or attempt.started) - attempt.started)
            total += seconds * (attempt.world_size if all_ranks else 1)
        return total if attempts else None

    @property
    def restarts(self) -> int:
        """The number of attempts after the first."""
        return max(0, len(self.record.attempts) - 1)


def gather(paths: Iterable[Path]) -> list[Facts]:
    """Read the runs, and ask the scheduler about those whose state is not clear."""
    _array_ids.cache_clear()
    runs = [Facts.read(path) for path in paths]
    squeue_answers = True
    if any(run.submission and not run.is_final for run in runs) and shutil.which("squeue"):
        try:
            _ask_squeue(runs)
        except LaunchError as error:
            log.warning("%s The states below are those in the run directories.", error)
            squeue_answers = False
    gone = []
    for run in runs:
        if run.job is not None:
            continue
        run.forget_old_submission()
        if run.recorded_state in ("queued", "running", "interrupted"):
            run.held = RunDir(run.path).is_locked()
            if run.job_id and not run.held:
                gone.append(run)
        if run.recorded_state in ("running", "failed") and not run.held:
            run.look_at_the_end()
    if gone and squeue_answers and shutil.which("sacct"):
        tasks = ended({run.job_id.partition("_")[0] for run in gone}) or {}
        for run in gone:
            run.ended = tasks.get(run.job_id)
    return runs


def _ask_squeue(runs: list[Facts]) -> None:
    open_runs = [run for run in runs if run.submission and not run.is_final]
    jobs = queue_of(run.record for run in open_runs)
    for index, run in enumerate(runs):
        if not run.submission or run.is_final:
            continue
        job = job_of(run.path, run.record, jobs)
        if job is None:
            # The job may have ended after run.json was read; then run.json says so now.
            run = runs[index] = Facts.read(run.path)
        run.job, run.scheduler = job, True
        run.job_id = job.id if job else run.job_id


@functools.cache
def _array_ids(script: str) -> tuple[str, ...]:
    """Return the job id of the array with this script, or those of a chain; none before sbatch."""
    try:
        with open_regular(Path(script).parent / "job_id") as file:
            words = file.read(10_000).decode(errors="replace").split()
    except OSError:
        return ()
    return tuple(words) if all(each.isascii() and each.isdecimal() for each in words) else ()
