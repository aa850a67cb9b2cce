"""Come back after a preemption or a time limit.

A job that exits by itself inside the grace time is COMPLETED and never requeued: it would be lost
without a word. So rank 0 asks for it, after the save and before the exit.
"""

from __future__ import annotations

import logging
import subprocess

log = logging.getLogger(__name__)


def requeue(job_id: str) -> bool:
    """Put the running job back into the queue; False, with the reason logged, if that fails.

    Args:
        job_id: as `squeue` takes it; `ARRAYJOB_TASK` for an array task, for the plain id would
            take the whole array along.
    """
    # `scancel` sends SIGTERM too, but its job is no longer RUNNING: it must not come back.
    state = _scheduler("squeue", "--noheader", "--jobs", job_id, "--format", "%T")
    if state is None or state.strip() != "RUNNING":
        log.info("job %s is %s: not requeued", job_id, (state or "unknown to squeue").strip())
        return False
    if _scheduler("scontrol", "requeue", job_id) is None:
        return False
    log.info("job %s is requeued", job_id)
    return True


def _scheduler(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        log.error("%s: %s", " ".join(command), (error.stderr or error.stdout).strip())
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("%s: %s", " ".join(command), error)
    else:
        return done.stdout
    return None
