"""Whether a run is still one of its job, which others share (`launch.pack`, a worker of a search).

The list of the run directories of a packed job is beside its script.
"""

import os
from collections.abc import Collection
from pathlib import Path

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import open_regular
from hpctrain.base.names.run_record import RunRecord, Submission
from hpctrain.cluster.slurm.queue import Job, Queue
from hpctrain.runs.state import stop_request


def runs_of(submission: Submission) -> list[str]:
    """Return the real paths of the runs of the job of a submission; none if there is no list."""
    try:
        with open_regular(Path(submission.script).parent / "tasks") as file:
            paths = file.read().splitlines()
    except OSError:
        return []
    first = submission.task * submission.pack
    return [os.path.realpath(os.fsdecode(path)) for path in paths[first : first + submission.pack]]


def has_left(run: Path, record: RunRecord) -> bool:
    """Return whether a run does not begin, or go on, in the shared job of its last submission.

    It has ended for good, was cancelled before it began, or was taken up outside of Slurm.
    """
    decided = record.attempt.verdict in ("failed", "cancel", "stopped")
    is_over = record.state == "finished" or (record.state in ("failed", "interrupted") and decided)
    if not record.shares_job:
        return record.by_worker and is_over
    waits = record.state != "running"
    cancelled = waits and stop_request.read(run, since=record.submitted) is not None
    return is_over or cancelled or record.is_outside_slurm


def job_of(run: Path, record: RunRecord, jobs: Queue) -> Job | None:
    """Return the job of a run; None if it is not in the queue, or the run has left it."""
    task = jobs.task_of(record)
    return None if task is None or has_left(run, record) else jobs.get(task)


def has_others(record: RunRecord, known: Collection[str]) -> bool:
    """Return whether the job of a run trains runs, or will, whose real paths are not `known`."""
    submission = record.submission
    if submission is None or not record.shares_job:
        return False
    return any(
        path not in known and not is_elsewhere(Path(path), submission.script)
        for path in runs_of(submission)
    )


def is_elsewhere(run: Path, script: str) -> bool:
    """Return whether a run has left the job of a script, or was submitted again with another."""
    try:
        record = RunRecord.of(run)
    except DamageError:
        return False
    submission = record.submission
    return submission is None or submission.script != script or has_left(run, record)
