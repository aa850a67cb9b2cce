"""How the ranks of a run have ended: what they, their observers, Slurm and Linux have said.

the file failed ── an error of a rank's own ───────────── counts first
hang.json ──────── an observer has missed a rank ───────┐
the file failed ── a late rank, a fault of a GPU ───────┤ the others' errors are consequences
logs ───────────── a timeout of NCCL ───────────────────┘
sacct, cgroup ──── time limit, memory of the host ─────── a rank was killed
"""

import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpctrain.base.errors import DamageError
from hpctrain.base.names.run_record import AttemptKey, AttemptRecord, Hang, Progress, RunRecord
from hpctrain.base.processes import causes
from hpctrain.base.processes.causes import PREEMPTED, TIME_LIMIT, USER_STOP, Cause
from hpctrain.cluster.ranks import flight_recorder
from hpctrain.cluster.slurm.requeue import cause_of_step
from hpctrain.runs.state import failure

# States of the observers (`faults.process_state`), and those of a node that cannot be used again.
_OF_STATE = {"dead": causes.RANK_KILLED, "silent": causes.NODE}
_LOST = "uninterruptible", "silent"
_ASKED = re.compile(r": asked to stop by (SIG\w+) ")  # and could not (`faults.stop`)


class End(NamedTuple):
    """How the ranks have ended."""

    cause: Cause
    text: str  # what is told of it, in one line
    frame: str = ""  # the line of the user's code: FILE:LINE in NAME
    step: int | None = None  # the global step that was reached, if it is known
    hosts: tuple[str, ...] = ()  # the nodes on which it happened
    bad: bool = False  # whether these nodes cannot be used again now
    raised: bool = False  # by code of the run; nobody has killed it
    smaller: bool = False  # whether the next attempt has smaller micro-batches


def end_of(run: Path, known: RunRecord, code: int, key: AttemptKey, left_s: float) -> End:
    """Return how the ranks of the last attempt have ended; `code` is that of srun."""
    now, step = known.attempt, _step(run, known.attempt)
    error, seen = failure.first(run, key), Hang.of(run, key, 0.0)
    if now.state == "interrupted":  # rank 0 has saved, but has not decided
        return stopped(now.reason, left_s)
    if known.lowered_in == key:
        rows = known.micro_batch_rows
        return End(causes.GPU_MEMORY, f"out of memory: now {rows} rows", step=step, smaller=True)
    if error and (asked := _ASKED.search(error.error)):  # this allocation ends in a moment
        text = error.error.removeprefix("LateRankError: ")
        return End(stopped(asked[1], left_s).cause, text, error.frame, step)
    cause = causes.recorded(error.cause, error.error) if error else None
    if error and cause is causes.LOST_MOUNT:
        hosts = (error.host,) if error.host else ()
        return End(cause, error.error, error.frame, step, hosts, bad=bool(hosts))
    alone = seen and error and error.error.startswith("JoinError: ")  # it missed that rank
    if error and cause and cause not in (causes.HANG, causes.GPU_FAULT) and not alone:
        own = causes.recorded(now.cause, now.error)
        # Slurm has ended rank 0 before it could record anything, or it does not know the cause.
        knows = now.state == "failed" and own is not causes.ANOTHER_RANK
        found, text = (own, now.error) if knows else (cause, error.error)
        return End(found, text, error.frame, step, raised=True)
    if seen and cause is not causes.GPU_FAULT:
        cause = _OF_STATE.get(seen.state, causes.HANG)
        hosts = (seen.host,) if seen.state in _LOST else ()
        return End(cause, seen.sentence, seen.at, seen.step, hosts, bad=bool(hosts))
    if error and cause:
        hosts = (error.host,) if cause is causes.GPU_FAULT and error.host else ()
        return End(cause, error.error.removeprefix("LateRankError: "), error.frame, step, hosts)
    if text := flight_recorder.timeout(run / "logs", key.job_id):
        return End(causes.HANG, text, step=step)
    # Slurm kills the ranks of a job whose time is over: that is no crash.
    why = causes.TIME_LIMIT if left_s <= 0 else cause_of_step(key.step_id) or causes.RANK_KILLED
    return End(why, f"a rank was killed (exit code {code})", step=step)


def _step(run: Path, now: AttemptRecord) -> int | None:
    """Return the global step that an attempt has reached, as far as progress.json knows it."""
    with suppress(DamageError):
        progress = Progress.of(run)
        if progress.time >= now.started > 0:
            return progress.step
    return now.first_step


def stopped(reason: str, left_s: float) -> End:
    """Return the end of a run that a signal has stopped, and that has saved.

    Slurm's warning before the time limit is SIGUSR2; SIGTERM is a preemption while time is left.
    """
    if reason == "SIGINT":
        return End(USER_STOP, reason)
    return End(TIME_LIMIT if reason == "SIGUSR2" or left_s <= 0 else PREEMPTED, reason)


def left_s(env: Mapping[str, str] = os.environ) -> float:
    """Return the seconds until the time limit of this job; infinite if nobody tells."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return int(end) - time.time() if end.isdecimal() else math.inf
