"""How long before its time limit a job saves: what a stop of the run has taken, or `launch.warn_s`.

    progress.json ── the longest step and the longest save ── lead_s ── #SBATCH --signal=USR2@…
    a job that was queued with less, since saves became slower ── LeadTime ── asks rank 0 itself

A rank that has not stopped shortly before Slurm ends the job exits (`hpctrain.engine.faults.stop`):
Slurm requeues no job at its time limit, nor one that it cancels, but the batch script still can.
"""

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import DamageError
from hpctrain.base.names.run_record import Progress
from hpctrain.cluster.slurm.partition_limit import minutes
from hpctrain.cluster.slurm.queue import ask
from hpctrain.config.schema import LaunchConfig

LEAD, GRACE = "HPCTRAIN_LEAD_S", "HPCTRAIN_GRACE_S"
"""The variables with which the batch script tells its ranks what it was queued with."""

_SLOWER, _REST_S = 2.0, 30.0  # a busy file system; the end of the ranks and the requeue
_MOST = 0.25  # of the time limit
_LONGEST_S = 65535  # that Slurm takes
_VERDICT_S, _LEAST = 10.0, 0.75  # what the batch script needs then; the part that a rank has anyway


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
