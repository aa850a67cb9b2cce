"""The runs of one job (`launch.pack`), by the list of run directories beside its script."""

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


def others_in_job(record: RunRecord, known: Collection[str]) -> list[str]:
    """Return the runs that a job has beside those that are `known`, by their real paths.

    Runs that have ended for good, were cancelled, or have another job now do not count; one that
    cannot be read does.
    """
    submission = record.submission
    if submission is None or submission.pack == 1:
        return []
    return [
        path
        for path in runs_of(submission)
        if path not in known and _is_in_job(Path(path), submission)
    ]


def _is_in_job(run: Path, job: Submission) -> bool:
    try:
        record = RunRecord.of(run)
    except DamageError:
        return True
    own = record.submission is not None and record.submission.script == job.script
    left = record.has_left_job or stop_request.leaves_shared_job(run, record)
    return own and not left
