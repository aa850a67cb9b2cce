"""How the ranks of a run have ended: what they, their observers, Slurm and Linux have said.

the file failed ── an error of a rank's own ───────────── counts first
hang.json ──────── an observer has missed a rank ───────┐
the file failed ── a late rank, a fault of a GPU ───────┤ the others' errors are consequences
logs ───────────── a timeout of NCCL ───────────────────┘
sacct, cgroup ──── time limit, memory of the host ─────── a rank was killed
"""

import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.base.names.run_record import Attempt, AttemptKey, Hang, Progress, RunRecord
from hpctrain.base.processes import causes
from hpctrain.cluster.ranks import flight_recorder
from hpctrain.cluster.restarts import policy
from hpctrain.cluster.restarts.policy import Answer, End, Room
from hpctrain.cluster.slurm.requeue import cause_of_step
from hpctrain.errors import DamageError
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure, stop_request

log = logging.getLogger(__name__)
# States of the observers (`faults.process_state`), and those of a node that cannot be used again.
_OF_STATE = {"dead": causes.RANK_KILLED, "silent": causes.NODE}
_LOST = "uninterruptible", "silent"
_ASKED = re.compile(r": asked to stop by (SIG\w+) ")  # and could not (`faults.stop`)


def verdict(
    run: RunDir, code: int, key: AttemptKey, *, inside: bool = False, warn_s: float = 0.0
) -> str:
    """Return what the batch script must do with its job, and record what has happened.

    None of the run's ranks is alive, and the code, that of srun, is not 0. The answer is "restart",
    if the script can do that (`inside`), with the nodes to avoid; "requeue"; "cancel", with which
    Slurm shows the job as cancelled and not as failed; or "". `warn_s` is that of `launch`.
    """
    run.update()  # NFS caches the content of a folder until the client writes there
    known, last = run.read(), run.last_checkpoint()
    request = stop_request.read(run.path, since=known.submitted)
    error = failure.first(run.path, key)
    now = known.attempt
    # If not, the ranks ended before rank 0 has begun an attempt.
    # An attempt of this step that has paused is not the one that has ended now.
    begun = now.key == key and now.state != "paused"
    now = now if begun else Attempt()
    if now.verdict:  # by rank 0, or by a process like this one
        decided = Answer(now.verdict, avoid=now.avoid)
        return "cancel" if request and decided.goes_on else decided.words(inside=inside)
    told = error or now.state == "interrupted" or Hang.of(run.path, key, 0.0)
    silent = code <= 128 and not told
    if now.state == "finished" or (silent and not known.shares_job):
        return ""
    if error and error.error.startswith("InUseError: "):  # run.json is about another process
        return ""
    if not begun:
        facts: dict[str, Any] = key._asdict()
        if error:  # `logs` shows what was written since the start
            facts["started"] = failure.path(run.path).stat().st_mtime
        run.begin_attempt(launcher="slurm", first_step=last, **facts)
        known = run.read()
    if silent:  # the job may go on with other runs, so Slurm does not tell it
        text = f"the ranks ended with exit code {code}, and have not said why"
        run.end_attempt("failed", error=text, verdict="failed")
        return ""
    room = Room.of(known, inside=inside, warn_s=warn_s)
    found = _end(run.path, known, code, key, room.left_s)
    if request and not found.raised:
        text = now.reason if now.state == "interrupted" else f"cancelled by {request.by}"
        found = End(request.cause, text)
    answer = decide(run, found, room)
    begins = f"goes on from its checkpoint of step {last}" if last else "starts at step 0 again"
    if not found.raised:  # else the ranks have told it
        log.error("%s%s", answer.reason, f": the run {begins}" * answer.goes_on)
    return answer.words(inside=inside)


def decide(run: RunDir, end: End, room: Room) -> Answer:
    """Decide what follows from the end of the last attempt, record it, and return it."""
    record, last = run.read(), run.last_checkpoint()
    answer = policy.answer(record, end, room, last)
    now, kept = record.attempt, answer.record(last)
    if now.ended is not None:  # as rank 0 has recorded it
        kept |= {"ended": now.ended} | ({} if now.step is None else {"step": now.step})
    run.end_attempt(**kept)
    return answer


def _end(run: Path, known: RunRecord, code: int, key: AttemptKey, left_s: float) -> End:
    """Return how the ranks of the last attempt have ended; `code` is that of srun."""
    now, step = known.attempt, _step(run, known.attempt)
    error, seen = failure.first(run, key), Hang.of(run, key, 0.0)
    if now.state == "interrupted":  # rank 0 has saved, but has not decided
        return policy.stopped(now.reason, left_s)
    if known.lowered_in == key:
        rows = known.micro_batch_rows
        return End(causes.GPU_MEMORY, f"out of memory: now {rows} rows", step=step, smaller=True)
    if error and (asked := _ASKED.search(error.error)):  # this allocation ends in a moment
        text = error.error.removeprefix("LateRankError: ")
        return End(policy.stopped(asked[1], left_s).cause, text, error.frame, step)
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


def _step(run: Path, now: Attempt) -> int | None:
    """Return the global step that an attempt has reached, as far as progress.json knows it."""
    with suppress(DamageError):
        progress = Progress.of(run)
        if progress.time >= now.started > 0:
            return progress.step
    return now.first_step
