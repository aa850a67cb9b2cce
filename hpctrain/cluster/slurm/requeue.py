"""The job of this process: when it saves, why a step has ended, how it comes back into the queue.

    progress.json ── the longest step and the longest save ── lead_s ── #SBATCH --signal=USR2@…
    a job that was queued with less, since saves became slower ── LeadTime ── asks rank 0 itself

It saves as long before its time limit as a stop of the run has taken, or `launch.warn_s`. A rank
that has not stopped shortly before Slurm ends the job exits (`hpctrain.engine.faults.stop`): Slurm
requeues no job at its time limit, nor one that it cancels, but the batch script still can.
"""

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import DamageError
from hpctrain.base.names.run_record import Progress
from hpctrain.base.processes import cgroup
from hpctrain.base.processes.causes import HOST_MEMORY, OF_SLURM, Cause
from hpctrain.cluster.slurm.container import leave_note, note_from_env
from hpctrain.cluster.slurm.partition_limit import minutes
from hpctrain.cluster.slurm.queue import ask
from hpctrain.config.schema import LaunchConfig

log = logging.getLogger(__name__)
CHAIN = "HPCTRAIN_CHAIN"  # the file that has the ids of the jobs of a chain
_PAUSES_S = (0.2, 0.4, 0.8, 1.6, 2.0)
_ENDED_BY_SLURM = "PREEMPTED", "TIMEOUT", "OUT_OF_MEMORY", "FAILED"  # its batch script was killed

LEAD, GRACE = "HPCTRAIN_LEAD_S", "HPCTRAIN_GRACE_S"
"""The variables with which the batch script tells its ranks what it was queued with."""

_SLOWER, _REST_S = 2.0, 30.0  # a busy file system; the end of the ranks and the requeue
_MOST = 0.25  # of the time limit
_LONGEST_S = 65535  # that Slurm takes
_VERDICT_S, _LEAST = 10.0, 0.75  # what the batch script needs then; the part that a rank has anyway


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
    """Requeue this job; return False, with the reason in the log, when that fails.

    Slurm itself does not requeue a job that exits inside the grace time of a preemption: such a
    job is COMPLETED, and the run would be lost silently. A job whose end has begun can be requeued,
    too, as long as its ranks may save (KillWait), unless somebody has cancelled it.

    The id is as `squeue` takes it: `ARRAYJOB_TASK` for an array task, since the plain id would
    requeue the whole array.
    """
    # `scancel` sends SIGTERM, too. Its job is no longer RUNNING and must not be requeued.
    for pause in _PAUSES_S:
        if (state := _state(job_id)) != "SIGNALING":
            break
        # Slurm shows this for a moment while the signal of a preemption is on its way.
        time.sleep(pause)
    if state == "COMPLETING" and not _next_of_chain(job_id):
        command = ("sacct", "-X", "--noheader", "--parsable2", "--format=State", "--jobs", job_id)
        said = (ask(*command, quiet=True) or "").split()[:1]
        # Its answer may be late, and RUNNING says nothing of a job that somebody has cancelled.
        state = said[0] if said and said[0] in _ENDED_BY_SLURM else state
    if state not in ("RUNNING", "SIGNALING", *_ENDED_BY_SLURM):
        log.info("job %s is %s: not requeued", job_id, state)
        return False
    # Slurm refuses to requeue a job of `sbatch --no-requeue`, or of a site with JobRequeue=0.
    ask("scontrol", "update", f"JobId={job_id}", "Requeue=1", quiet=True)
    ended = state in _ENDED_BY_SLURM
    if ask("scontrol", "requeue", job_id, quiet=ended) is None:
        if ended:  # perhaps Slurm has requeued it itself
            log.info("job %s is %s: not requeued by its rank 0", job_id, state)
        return False
    log.info("job %s is requeued", job_id)
    return True


def _state(job_id: str) -> str:
    answer = ask("squeue", "--noheader", "--jobs", job_id, "--format=%T") or ""
    states: list[str] = re.findall(r"^[A-Z_]+$", answer, re.MULTILINE)
    return states[-1] if states else "unknown"


def _next_of_chain(job_id: str) -> bool:
    """Return whether another job of a chain waits for the end of this one."""
    file = Path(os.environ.get(CHAIN, ""))
    return file.is_file() and file.read_text().split()[-1] != job_id.partition("_")[0]


def cause_of_step(
    step_id: int, env: Mapping[str, str] = os.environ, groups: Iterable[Path] | None = None
) -> Cause | None:
    """Return why a step of this job has ended, if `sacct` or the control group of the job knows."""
    step = f"{env.get('SLURM_JOB_ID', '')}.{step_id}"
    if step[0] != "." and shutil.which("sacct"):
        command = ("sacct", "--noheader", "--parsable2", f"--jobs={step}", "--format=State")
        state = (ask(*command, quiet=True) or "").partition("\n")[0]
        if state:
            return OF_SLURM.get(state.split()[0])
    # The counts of a group have those of the steps in it, also after their end.
    for group in cgroup.folders("memory") if groups is None else groups:
        if group.name == f"job_{env.get('SLURM_JOB_ID')}":
            said = "\n".join(cgroup.text(group, f"memory.{n}") for n in ("events", "oom_control"))
            if re.search(r"^oom_kill [1-9]", said, re.MULTILINE):
                return HOST_MEMORY
    return None


def lead_s(launch: LaunchConfig, run: Path) -> int:
    """Return the seconds before the time limit at which a run saves; at least `launch.warn_s`.

    A step and a save may take twice as long as the longest so far. No more than a quarter of the
    time limit is given away, unless `launch.warn_s` says so.
    """
    stop_s = 0.0
    with suppress(DamageError):
        stop_s = Progress.of(run).stop_s
    if not stop_s:
        return launch.warn_s
    measured_s = min(_SLOWER * stop_s + _REST_S, _MOST * 60 * launch.time_min)
    return max(launch.warn_s, min(math.ceil(measured_s), _LONGEST_S))


def limits_s() -> dict[str, float]:
    """Return how many seconds after a signal a rank must have stopped; templates do not tell it."""
    known = {"SIGUSR2": os.environ.get(LEAD, ""), "SIGTERM": os.environ.get(GRACE, "")}
    return {name: _without_verdict(int(text)) for name, text in known.items() if text.isdecimal()}


def _without_verdict(seconds: float) -> float:
    return max(seconds - _VERDICT_S, _LEAST * seconds)


class LeadTime:
    """Tells rank 0 that it must save now, if its job was queued with a shorter lead time."""

    def __init__(self, launch: LaunchConfig, run: Path, job_id: str) -> None:
        self._launch, self._run, self._job_id = launch, run, job_id
        self._queued_s = int(os.environ.get(LEAD) or launch.warn_s)
        self._end = 0.0  # of the job, as far as it is known

    def due_s(self) -> float | None:
        """Return the seconds in which the run must stop, if it must begin now; else None."""
        needed_s = lead_s(self._launch, self._run)
        if needed_s <= self._queued_s:  # Slurm sends its signal earlier
            return None
        if time.time() > self._end - needed_s:  # at first; and the limit may have been extended
            command = ("squeue", "--noheader", f"--jobs={self._job_id}", "--format=%L")
            self._end = time.time() + _seconds(ask(*command, quiet=True) or "")
        left_s = self._end - time.time()
        return None if left_s > needed_s else _without_verdict(left_s)


def _seconds(answer: str) -> float:
    """Return the seconds in an answer of squeue, in which a site may print more."""
    for line in answer.splitlines()[::-1]:
        with suppress(ValueError):
            return 60 * minutes(line.strip())
    return math.inf
