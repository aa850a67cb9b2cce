"""Put the running job back into Slurm's queue, so that the run goes on later."""

import logging
import os
import re
import time
from collections.abc import Sequence
from itertools import takewhile

from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.run_record import Attempt
from hpctrain.slurm.container import leave_note, note_from_env
from hpctrain.slurm.queue import ask

log = logging.getLogger(__name__)
_PAUSE_S, _PAUSES = 0.2, 25
_MOST_PORTS = 3  # restarts in a row that have found their port taken


def may_requeue(restart_count: int, first_step: int, step: int) -> bool:
    """Return whether the budget allows another restart: one without progress, then none.

    A run that makes no step between two restarts would be requeued for ever. The steps are those of
    the checkpoints that this attempt began with, and that the next one would begin with.
    """
    return restart_count == 0 or step > first_step


def requeue_for_a_port(ranks: RankInfo, attempts: Sequence[Attempt]) -> bool:
    """Requeue the job whose port is taken: a restart uses another port. Rank 0 calls this.

    The last one of the attempts is this one. Return whether the job starts again. It does not when
    MASTER_PORT names the port, outside of Slurm, nor after three restarts in a row that have found
    their port taken.
    """
    if ranks.launcher != "slurm" or "MASTER_PORT" in os.environ:
        return False
    before = takewhile(lambda one: " is taken (" in one.reason, reversed(attempts[:-1]))
    again = sum(1 for _ in before)
    if again >= _MOST_PORTS:
        log.error("%d restarts in a row have found their port taken: not requeued", again)
        return False
    return requeue_from_rank(ranks.job_id)


def requeue_from_rank(job_id: str, exclude: str = "") -> bool:
    """Requeue the job of this rank; in a container, which lacks Slurm, let the host do it.

    `job_id` is as `squeue` takes it. `exclude` are the hosts that the job shall avoid, as Slurm
    writes them; "" changes nothing. Return False, with the reason in the log, when that fails.
    """
    if (note := note_from_env()) is not None:
        return leave_note(note, exclude)
    if not requeue(job_id):
        return False
    if exclude:  # Slurm changes this of a job that waits, so after the requeue
        ask("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={exclude}")
    return True


def requeue(job_id: str) -> bool:
    """Requeue this running job; return False, with the reason in the log, when that fails.

    Slurm itself does not requeue a job that exits inside the grace time of a preemption: such a
    job is COMPLETED, and the run would be lost silently.

    The id is as `squeue` takes it: `ARRAYJOB_TASK` for an array task, since the plain id would
    requeue the whole array.
    """
    # `scancel` sends SIGTERM, too. Its job is no longer RUNNING and must not be requeued.
    for _ in range(_PAUSES):
        if (state := _state(job_id)) != "SIGNALING":
            break
        # Slurm shows this for a moment while the signal of a preemption is on its way.
        time.sleep(_PAUSE_S)
    if state not in ("RUNNING", "SIGNALING"):
        log.info("job %s is %s: not requeued", job_id, state)
        return False
    # Slurm refuses to requeue a job of `sbatch --no-requeue`, or of a site with JobRequeue=0.
    ask("scontrol", "update", f"JobId={job_id}", "Requeue=1", quiet=True)
    if ask("scontrol", "requeue", job_id) is None:
        return False
    log.info("job %s is requeued", job_id)
    return True


def _state(job_id: str) -> str:
    answer = ask("squeue", "--noheader", "--jobs", job_id, "--format=%T") or ""
    states: list[str] = re.findall(r"^[A-Z_]+$", answer, re.MULTILINE)
    return states[-1] if states else "unknown"
