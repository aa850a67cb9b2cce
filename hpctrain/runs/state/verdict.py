"""The verdict: what becomes of a run after the end of its ranks. Read this first.

    a rank of it        an error, a signal ── the file failed, run.json ─┐
    the observer        a rank that hangs ─── hang.json ─────────────────┤ what is known of the end
    Slurm and Linux     a killed step ─────── sacct, cgroup ─────────────┘ (`runs.state.end`)
                                                                         │
    rank 0, before it leaves (`engine.job.attempt`) ─────┐              End
    an end that rank 0 alone knows (`go_on`) ────────────┤               │
    the batch script, after srun (`engine.job.verdict`) ─┴── decide(record, end, room, last)
                                                                         │
    the batch script: srun, scontrol requeue, scancel ── run.json ── Verdict
    rank 0, if it knows: `cluster.slurm.requeue` ────────────┘

docs/operate.md has the table. A restart starts the ranks again in the same job. If the batch script
cannot do that, or the job has little time left, a requeue takes its place. Both have one budget:
`MOST` in a row without a new checkpoint; and the same end at the same step is not tried again.

The verdict is in run.json before anybody acts on it. So nobody decides twice on one end, and what
was decided counts, whoever died before it was done.
"""

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpctrain.base.names.run_record import AttemptKey, AttemptRecord, Hang, RunRecord
from hpctrain.base.processes.causes import (
    ANOTHER_RANK,
    GPU_FAULT,
    GPU_MEMORY,
    HANG,
    HOST_MEMORY,
    IDLE,
    LOST_MOUNT,
    NODE,
    PORT,
    PREEMPTED,
    RANK_KILLED,
    TIME_LIMIT,
    USER_STOP,
    one_line,
)
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.config.job_request import JobRequest
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure, stop_request
from hpctrain.runs.state.end import End, end_of, left_s

log = logging.getLogger(__name__)
MOST = 3
GOES_ON = "restart", "requeue"
LEAVES = "leave"
"""The word for a job of which another process trains the run: what that records stays as it is."""
DECIDED_LATER = {ANOTHER_RANK, HANG, GPU_FAULT, GPU_MEMORY, LOST_MOUNT, RANK_KILLED}
"""What rank 0 sees may be a consequence of these: it is decided when all ranks are gone."""

_AGAIN = {RANK_KILLED, HANG, GPU_FAULT, LOST_MOUNT, PORT, NODE, TIME_LIMIT, HOST_MEMORY}
_FREE = {PREEMPTED.name, GPU_MEMORY.name}
_START_S = 120.0  # what a start takes at least; then the warning before the time limit must fit
_CURES = {
    RANK_KILLED: "If the host had no memory left, raise launch.mem_gb; ",
    HOST_MEMORY: "Raise launch.mem_gb; ",
    TIME_LIMIT: "Raise launch.time_min, or save more often (checkpoint.every_steps); ",
}
_NUMBERS = re.compile(r"\b(0x)?(?=[a-f]*\d)[0-9a-f]+\b|\d+", re.IGNORECASE)
_LONGEST = 300  # characters of a fingerprint


class Room(NamedTuple):
    """What the job has left: whether its script restarts ranks, seconds, nodes that do nothing."""

    inside: bool = False
    left_s: float = math.inf
    spares: int = 0
    warn_s: float = 0.0  # launch.warn_s

    @property
    def ends_soon(self) -> bool:
        """Whether too little time is left for a start and the warning before the time limit."""
        return self.left_s < self.warn_s + _START_S

    @classmethod
    def of(
        cls, record: RunRecord, *, inside: bool, warn_s: float, env: Mapping[str, str] = os.environ
    ) -> "Room":
        """Return the room by the variables of the job, and the nodes that it avoids already."""
        now = record.attempt
        mine = [one for one in record.attempts if one.key[:2] == now.key[:2]]
        avoided = {host for one in mine for host in one.avoid}
        spares = int(env.get("SLURM_JOB_NUM_NODES") or 0) - now.nodes - len(avoided)
        return cls(inside, left_s(env), max(0, spares), warn_s)


class Verdict(NamedTuple):
    """What follows: "restart", "requeue", "cancel", "stopped" (nobody goes on) or "failed"."""

    action: str
    reason: str = ""
    avoid: tuple[str, ...] = ()  # the nodes without which the run goes on
    facts: Mapping[str, Any] = {}  # for the record of the attempt

    @property
    def goes_on(self) -> bool:
        """Whether the run is started again without a person."""
        return self.action in GOES_ON

    def record(self, last: int) -> dict[str, Any]:
        """Return the arguments of `RunDir.end_attempt`; `last` is the step of the checkpoint."""
        if self.action == "failed":
            return {"state": "failed", "error": self.reason, **self.facts}
        return {"state": "interrupted", "reason": self.reason, "step": last, **self.facts}

    def words(self, *, inside: bool) -> str:
        """Return what the batch script reads.

        One that restarts ranks also keeps the bad nodes, and requeues the job if too few are left.
        """
        if self.goes_on and inside and self.avoid:
            return f"restart --exclude={','.join(self.avoid)}"
        if self.action == "restart":
            return "restart" if inside else "requeue"
        return self.action if self.action in ("requeue", "cancel") else ""


def decide(record: RunRecord, end: End, room: Room, last: int) -> Verdict:
    """Return what follows from the end of the last attempt of the record.

    `last` is the step of the newest checkpoint, with which the next attempt would begin.
    """
    known = fingerprint(end, record.attempt.hosts)
    found = _decide(end, room, _spent(record, end, last, known))
    facts = {"cause": end.cause.name, "fingerprint": known, "ended_at": end.step}
    return found._replace(facts=facts | {"verdict": found.action, "avoid": list(found.avoid)})


def _decide(end: End, room: Room, spent: str) -> Verdict:
    cause, text = end.cause, end.text
    if cause in (USER_STOP, IDLE):
        return Verdict("stopped" if text == "SIGINT" else "cancel", text)
    if cause is PREEMPTED:
        return Verdict("requeue", text)
    again = end.smaller if cause is GPU_MEMORY else cause in _AGAIN
    if not again or (cause is HOST_MEMORY and end.raised):
        return Verdict("failed", text)
    if spent:
        cure = f"{_CURES.get(cause, '')}`resume` starts the run again"
        return Verdict("failed", f"{text}, {spent}. {cure}")
    short = len(end.hosts) > room.spares
    if cause is TIME_LIMIT or not room.inside or room.ends_soon or (end.bad and short):
        return Verdict("requeue", text, end.hosts if end.bad and not room.ends_soon else ())
    return Verdict("restart", text, () if short else end.hosts)


def _spent(record: RunRecord, end: End, last: int, known: str) -> str:
    """Return why the run is not started again; "" if it may be."""
    first = record.attempt.first_step or 0
    alike = [one for one in _series(record)[:-1] if one.fingerprint == known]
    # An attempt that has made no step says nothing about a step.
    if end.step is not None and end.step > first and end.step in [one.ended_at for one in alike]:
        return f"for the second time at step {end.step}: it would come again, so not requeued"
    if last > first or end.cause is GPU_MEMORY:
        return ""
    spent = _restarts(record)
    if spent >= MOST or (end.cause is TIME_LIMIT and spent and alike):
        often = f" ({spent} in a row)" if spent > 1 else ""
        return f"and no checkpoint was saved since the last restart{often}: not requeued"
    return ""


def restarts(record: RunRecord, last: int) -> str:
    """Return how much of its budget a run has spent; "" for nothing.

    `last` is the step of its newest checkpoint.
    """
    spent = 0 if last > (record.attempt.first_step or 0) else _restarts(record)
    return f"restart {spent} of {MOST} without a new checkpoint" if spent else ""


def _restarts(record: RunRecord) -> int:
    """Return the restarts before the last attempt since the last one that has saved."""
    found, after = 0, record.attempt
    for one in reversed(_series(record)[:-1]):
        if (after.first_step or 0) > (one.first_step or 0):
            break
        found += one.verdict in GOES_ON and one.cause not in _FREE
        after = one
    return found


def _series(record: RunRecord) -> Sequence[AttemptRecord]:
    """Return the attempts that no person has started, and the first of them, which one has."""
    now, found = record.attempt, list[AttemptRecord]()
    for one in reversed(record.attempts):
        # A link of a chain is another job of the same submission.
        same = 0 < record.submitted <= one.started
        if one.job_id != now.job_id and not same:
            break
        found.append(one)
    return found[::-1]


def fingerprint(end: End, hosts: Sequence[str] = ()) -> str:
    """Return cause, message (without numbers, addresses, hosts) and the user's line of an end."""
    text = one_line(end.text)
    for host in sorted({*hosts, *end.hosts}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", text)
    text = " ".join(_NUMBERS.sub("#", text).split())
    return f"{end.cause}: {text}"[:_LONGEST] + (f" at {end.frame}" if end.frame else "")


def after_srun(
    run: RunDir, code: int, key: AttemptKey, *, inside: bool = False, warn_s: float = 0.0
) -> str:
    """Return what the batch script must do with its job, and record what has happened.

    None of the run's ranks is alive, and the code, that of srun, is not 0. The word is "restart",
    if the script can do that (`inside`), with the nodes to avoid; "requeue"; "cancel", with which
    Slurm shows the job as cancelled and not as failed; LEAVES; or "". `warn_s` is that of `launch`.
    """
    run.update()  # NFS caches the content of a folder until the client writes there
    known, last = run.read(), run.last_checkpoint()
    request = stop_request.read(run.path, since=known.submitted)
    error = failure.first(run.path, key)
    now = known.attempt
    # If not, the ranks ended before rank 0 has begun an attempt.
    # An attempt of this step that has paused is not the one that has ended now.
    begun = now.key == key and now.state != "paused"
    if not begun and run.is_locked():
        return LEAVES
    now = now if begun else AttemptRecord()
    if now.verdict:  # by rank 0, or by a process like this one
        decided = Verdict(now.verdict, avoid=now.avoid)
        return "cancel" if request and decided.goes_on else decided.words(inside=inside)
    told = error or now.state == "interrupted" or Hang.of(run.path, key, 0.0)
    silent = code <= 128 and not told
    if now.state == "finished" or (silent and not known.shares_job):
        return ""
    if error and error.error.startswith("InUseError: "):
        return LEAVES
    if not begun:
        facts: dict[str, Any] = key._asdict()
        if error:  # `logs` shows what was written since the start
            facts["started"] = failure.Failure.path(run.path).stat().st_mtime
        run.begin_attempt(launcher="slurm", first_step=last, **facts)
        known = run.read()
    if silent:  # the job may go on with other runs, so Slurm does not tell it
        text = f"the ranks ended with exit code {code}, and have not said why"
        run.end_attempt("failed", error=text, verdict="failed")
        return ""
    room = Room.of(known, inside=inside, warn_s=warn_s)
    found = end_of(run.path, known, code, key, room.left_s)
    if request and not found.raised:
        text = now.reason if now.state == "interrupted" else f"cancelled by {request.by}"
        found = End(request.cause, text)
    verdict = _recorded(run, found, room)
    begins = f"goes on from its checkpoint of step {last}" if last else "starts at step 0 again"
    if not found.raised:  # else the ranks have told it
        log.error("%s%s", verdict.reason, f": the run {begins}" * verdict.goes_on)
    return verdict.words(inside=inside)


def _recorded(run: RunDir, end: End, room: Room) -> Verdict:
    """Decide what follows from the end of the last attempt, record it, and return it."""
    known, last = run.read(), run.last_checkpoint()
    verdict = decide(known, end, room, last)
    now, kept = known.attempt, verdict.record(last)
    if now.ended is not None:  # as rank 0 has recorded it
        kept |= {"ended": now.ended} | ({} if now.step is None else {"step": now.step})
    run.end_attempt(**kept)
    return verdict


def go_on(run: RunDir, ranks: RankInfo, end: End, job: JobRequest) -> None:
    """Decide what follows from an end that rank 0 alone knows, and requeue the job if need be.

    Outside Slurm nobody starts the ranks again, and nothing is done.
    """
    if ranks.launcher != "slurm":
        return
    from hpctrain.cluster.slurm import excluded_hosts
    from hpctrain.cluster.slurm.sbatch_options import joined_hosts

    inside = epochs.in_loop(run.path, ranks.attempt_key)
    room = Room.of(run.read(), inside=inside, warn_s=job.launch.warn_s)
    # A batch script that restarts ranks asks what was decided, and does it.
    if _recorded(run, end, room).goes_on and not inside:
        own = str(job.site.sbatch.get("exclude") or "")
        # It avoids also a host that was only unlike: the GPUs of one host may differ.
        hosts = sorted({*end.hosts, *excluded_hosts.avoided(job)}) if end.hosts else ()
        requeue_from_rank(ranks.job_id, exclude=joined_hosts(own, *hosts) if hosts else "")
