"""What follows from the end of the ranks of a run: decided here, and nowhere else.

    rank 0, before it leaves ──┐
                               ├── answer(record, end, room, last) ── Answer ── run.json ── acted on
    the verdict, after srun ───┘

docs/operate.md has the table. A restart starts the ranks again in the same job. If the batch script
cannot do that, or the job has little time left, a requeue takes its place. Both have one budget:
`MOST` in a row without a new checkpoint; and the same end at the same step is not tried again.

The answer is in run.json before anybody acts on it. So nobody decides twice on one end, and what
was decided counts, whoever died before it was done.
"""

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpctrain.base.names.run_record import Attempt, RunRecord
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
    Cause,
    one_line,
)

MOST = 3
GOES_ON = "restart", "requeue"
JUDGED_LATER = {ANOTHER_RANK, HANG, GPU_FAULT, GPU_MEMORY, LOST_MOUNT, RANK_KILLED}
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


class Answer(NamedTuple):
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


def answer(record: RunRecord, end: End, room: Room, last: int) -> Answer:
    """Return what follows from the end of the last attempt of the record.

    `last` is the step of the newest checkpoint, with which the next attempt would begin.
    """
    known = fingerprint(end, record.attempt.hosts)
    found = _answer(end, room, _spent(record, end, last, known))
    facts = {"cause": end.cause.name, "fingerprint": known, "ended_at": end.step}
    return found._replace(facts=facts | {"verdict": found.action, "avoid": list(found.avoid)})


def _answer(end: End, room: Room, spent: str) -> Answer:
    cause, text = end.cause, end.text
    if cause in (USER_STOP, IDLE):
        return Answer("stopped" if text == "SIGINT" else "cancel", text)
    if cause is PREEMPTED:
        return Answer("requeue", text)
    again = end.smaller if cause is GPU_MEMORY else cause in _AGAIN
    if not again or (cause is HOST_MEMORY and end.raised):
        return Answer("failed", text)
    if spent:
        cure = f"{_CURES.get(cause, '')}`resume` starts the run again"
        return Answer("failed", f"{text}, {spent}. {cure}")
    short = len(end.hosts) > room.spares
    if cause is TIME_LIMIT or not room.inside or room.ends_soon or (end.bad and short):
        return Answer("requeue", text, end.hosts if end.bad and not room.ends_soon else ())
    return Answer("restart", text, () if short else end.hosts)


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


def _series(record: RunRecord) -> Sequence[Attempt]:
    """Return the attempts that no person has started, and the first of them, which one has."""
    now, found = record.attempt, list[Attempt]()
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
