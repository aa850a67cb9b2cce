"""The runs that share a job (`launch.pack`), by the list of run directories beside its script."""

import os
from collections.abc import Collection
from pathlib import Path

from hpctrain.disk import open_regular
from hpctrain.errors import DamageError
from hpctrain.run_record import RunRecord, Submission
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


def is_cancelled(run: Path, record: RunRecord) -> bool:
    """Return whether a run was cancelled, and so does not begin with the job that it shares."""
    waits = record.shares_job and record.state != "running"
    return waits and stop_request.read(run, since=record.submitted) is not None


def has_others(record: RunRecord, known: Collection[str]) -> bool:
    """Return whether the job of a run trains runs, or will, whose real paths are not `known`."""
    submission = record.submission
    if submission is None or not record.shares_job:
        return False
    return any(
        path not in known and not is_left(Path(path), submission.script)
        for path in runs_of(submission)
    )


def is_left(run: Path, script: str) -> bool:
    """Return whether a run does not begin, or go on, in the job of a script, which it shares.

    It has ended for good, was cancelled, or was submitted again.
    """
    try:
        record = RunRecord.of(run)
    except DamageError:
        return False
    elsewhere = record.submission is None or record.submission.script != script
    return elsewhere or record.has_left_job or is_cancelled(run, record)
