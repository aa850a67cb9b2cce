"""The final status of a run whose process was killed, and so could not record it itself.

The batch script records it when its ranks have ended for good (`hpctrain.engine.job.verdict`), and
`hpctrain status --upload` records it when Slurm knows the job no more. Without it MLflow would show
the run as RUNNING for ever.
"""

from pathlib import Path
from typing import Any

from hpctrain.base.processes.child import Process
from hpctrain.tracking.journal import Journal, journal_path, last_record

UNRECORDED = "the training process ended without a final status"


def is_open(run_dir: Path) -> bool:
    """Return whether the newest attempt of a run has recorded its start, and no final status."""
    return _status(run_dir).get("status") == "RUNNING"


def has_died_here(run_dir: Path) -> bool:
    """Return whether the process of an open run was on this host and runs no more."""
    body = _status(run_dir)
    if body.get("status") != "RUNNING":
        return False
    return Process(body["host"], body["pid"], body["started"]).died_here


def close(run_dir: Path, status: str, reason: str) -> None:
    """Record the final status of the newest attempt. No process of the run may be alive."""
    journal = Journal(run_dir)
    journal.attempt -= 1
    journal.append("status", status=status, reason=reason)
    journal.close()


def prune(run_dir: Path, reason: str) -> bool:
    """Record that a paused trial of a search has ended; return whether it was paused."""
    if paused := _status(run_dir).get("status") == "SCHEDULED":
        close(run_dir, "KILLED", reason)
    return paused


def correct(run_dir: Path, status: str, reason: str) -> bool:
    """Record the reason of the end that rank 0 did not know; return whether it had another one."""
    body = _status(run_dir)
    known = body.get("reason") == reason and body.get("final", True)
    if body.get("status") in (None, "RUNNING") or known:
        return False
    close(run_dir, status, reason)
    return True


def _status(run_dir: Path) -> dict[str, Any]:
    return last_record(journal_path(run_dir), "status") or {}
