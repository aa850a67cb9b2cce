"""Put the running job back into Slurm's queue, so that the run goes on later."""

from __future__ import annotations

import logging

from hpctrain.launch.queue import ask

log = logging.getLogger(__name__)


def requeue(job_id: str) -> bool:
    """Put this running job back into the queue; False, with the reason logged, if that fails.

    A job that exits by itself inside the grace time of a preemption is COMPLETED and never
    requeued: it would be lost without a word.

    Args:
        job_id: as `squeue` takes it; `ARRAYJOB_TASK` for an array task, for the plain id would
            take the whole array along.
    """
    # `scancel` sends SIGTERM too, but its job is no longer RUNNING: it must not come back.
    state = (ask("squeue", "--noheader", "--jobs", job_id, "--format=%T") or "unknown").strip()
    if state != "RUNNING":
        log.info("job %s is %s: not requeued", job_id, state)
        return False
    if ask("scontrol", "requeue", job_id) is None:
        return False
    log.info("job %s is requeued", job_id)
    return True
