"""Where the time of a run went: every second of its allocations is in exactly one part.

    allocation   ├ startup ┼ compute, data_wait, checkpoint ... ┼── lost ──┼ shutdown ┤
    records              the first ...        last kept step ┘   └ the end of what was repeated

What the training has recorded is taken as it is (`time` in the journal). What comes before its
process is start-up, what comes after is shutdown. Steps that a later attempt has made again are
lost, with all that was done for them. Seconds of which no record tells are `unknown`. A job that
was requeued has one allocation for each time that it ran (`sacct --duplicates`).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hpctrain.base.names.run_record import AttemptRecord
from hpctrain.cluster.slurm.queue import ask, rows, since_epoch
from hpctrain.insight.report.account.history import History, TimeRecord

PARTS = {  # with their titles
    "compute": "compute",
    "communication": "communication",
    "data_wait": "wait for data",
    "checkpoint": "checkpoints",
    "evaluation": "evaluations",
    "startup": "start-up",
    "compile": "compile",
    "restart": "start-up again",
    "lost": "lost steps",
    "slow_rank": "slow rank",
    "idle": "no program",
    "shutdown": "shutdown",
    "other": "other",
    "unknown": "unknown",
}
USEFUL = ("compute", "communication")
_ROUNDING_S = 2.0  # sacct counts whole seconds
_FIELDS = ("JobID", "Submit", "Start", "End", "State")
_AT_ONCE = 500  # job ids of one call of sacct


@dataclass(frozen=True)
class Allocation:
    """One time that a job ran or waited."""

    submitted: float  # or requeued, in seconds since the epoch
    start: float | None  # None while it waits, or if it never started
    end: float | None  # None while it has its nodes
    state: str  # Slurm's


@dataclass
class Span:
    """One attempt on the clock, in seconds since the epoch."""

    number: int  # from 1
    facts: AttemptRecord  # of run.json
    begin: float
    end: float  # now, while it runs
    first_step: int  # the global step from which it went on
    killed: bool  # it could not note its end
    runs: bool
    records: list[TimeRecord] = field(default_factory=list)  # of where time went
    reached: int = 0  # the last step that it is known to have made
    scheduler: str = ""  # Slurm's state of its allocation; "" if unknown
    # Seconds, with those of its allocation before and after.
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def seconds(self) -> float:
        """All seconds that are accounted for."""
        return sum(self.parts.values())

    @property
    def state(self) -> str:
        """How it has ended, or that it runs."""
        return self.facts.state or ("running" if self.runs else "killed")


def spans(
    attempts: Sequence[AttemptRecord],
    history: History,
    heard: Iterable[float],
    *,
    running: bool,
    now: float,
) -> list[Span]:
    """Return the attempts of a run on the clock, in seconds since the epoch.

    `heard` are other times at which the run was alive, such as those of sensors.
    """
    found: list[Span] = []
    begun = [each for each in attempts if each.started]
    heard = sorted([*heard, *(time for time, _ in history.reported)])
    for index, facts in enumerate(begun):
        started, last = facts.started, index == len(begun) - 1
        following = math.inf if last else begun[index + 1].started
        records = [each for each in history.times if started <= each.time < following]
        begin = min([started, *(each.time - each.total for each in records[:1])])
        if found and not found[-1].killed:
            begin = max(begin, found[-1].end)
        runs = running and last and facts.ended is None
        signs = [*heard, facts.seen or started]
        alive = [time for time in signs if started <= time < following]
        alive += [each.time for each in records]
        known = max(alive, default=started) if facts.ended is None else facts.ended
        end = now if runs else known
        span = Span(
            number=index + 1,
            facts=facts,
            begin=begin,
            end=max(begin, min(end, following)),
            first_step=facts.first_step or 0,
            killed=facts.ended is None and not runs,
            runs=runs,
            records=records,
        )
        steps = [step for time, step in history.reported if started <= time < following]
        span.reached = max([*steps, *(each.step for each in records), span.first_step])
        found.append(span)
    return found


def divide(found: list[Span], history: History) -> None:
    """Divide the time of each attempt into its parts, in place."""
    for index, span in enumerate(found):
        # Any later attempt that went on from an earlier step has made all later steps again.
        kept = min((each.first_step for each in found[index + 1 :]), default=math.inf)
        rewinds = [
            (time, step)
            for time, step in history.rewinds
            if span.begin < time <= span.end and span.first_step <= step
        ]
        _divide(span, kept, rewinds)
        if index:
            span.parts["restart"] += span.parts["startup"]
            span.parts["startup"] = 0.0


def _divide(span: Span, kept: float, rewinds: list[tuple[float, int]]) -> None:
    parts = span.parts
    if not span.records:
        parts["unknown"] += span.end - span.begin
        return
    first, last = span.records[0], span.records[-1]
    began = last.time - last.total
    parts["startup"] += max(0.0, began - span.begin)
    # No step can lose these parts again: a compiled step stays compiled.
    before: dict[str, float] = {
        name: first.seconds[name] for name in ("startup", "compile") if name in first.seconds
    }
    for name, value in before.items():
        parts[name] += value
    # Where nothing was lost, the last record has it all.
    whole = not rewinds and last.step <= kept
    told = [
        TimeRecord(began, span.first_step, before),
        *(span.records[-1:] if whole else span.records),
    ]
    for old, new in pairwise(told):
        last_kept = min([kept, *(step for time, step in rewinds if time > new.time)])
        back = (step for time, step in rewinds if old.time < time <= new.time)
        share = _kept_share(min([old.step, *back]), new.step, last_kept)
        for name, value in new.seconds.items():
            spent = value - old.seconds.get(name, 0.0)
            parts[name if name in parts else "other"] += share * spent
            parts["lost"] += (1 - share) * spent
    tail = max(0.0, span.end - last.time)
    if span.killed:
        parts["lost" if kept < span.reached else "unknown"] += tail
    else:
        parts["unknown" if span.runs else "shutdown"] += tail


def _kept_share(before: int, after: int, last: float) -> float:
    """Return which part of the steps between two records counts; `last` is the last that does."""
    if after <= last:
        return 1.0
    return (last - before) / (after - before) if before < last else 0.0


def allocate(
    found: list[Span], booked: dict[str, list[Allocation]], now: float, *, shared: bool
) -> float:
    """Add the time of what jobs have booked, by their ids, around the divided attempts, in place.

    It returns the seconds of allocations in which no attempt has begun. `now` ends one that lasts.
    A run that has `shared` its job does not count what follows its end: others trained on.
    """
    unused = 0.0
    for job, each in booked.items():
        for one in each:
            if one.start is None:
                continue
            end = now if one.end is None else one.end
            inside = [
                span
                for span in found
                if span.facts.job_id == job
                and one.start - _ROUNDING_S <= span.facts.started <= end + _ROUNDING_S
            ]
            if not inside:
                unused += 0.0 if shared else end - one.start
                continue
            first, last = inside[0], inside[-1]
            last.scheduler = one.state
            part = "startup" if first.number == 1 else "restart"
            first.parts[part] += max(0.0, first.begin - one.start)
            for before, after in pairwise(inside):
                # The batch script starts the ranks again, or a person does in an `salloc` shell.
                again = before.facts.state == "interrupted"
                span, name = (after, "restart") if again else (before, "idle")
                span.parts[name] += max(0.0, after.begin - before.end)
            rest = 0.0 if shared else max(0.0, end - last.end)
            if last.killed:
                last.parts["lost" if last is not found[-1] else "unknown"] += rest
            else:
                last.parts["shutdown"] += rest
    return unused


def allocations(job_ids: Iterable[str]) -> dict[str, list[Allocation]] | None:
    """Return the allocations of jobs by job id, in the order of their submission.

    They are None without an accounting database. With no job, nothing is called.
    """
    ids = sorted(set(job_ids))
    found: dict[str, list[Allocation]] = defaultdict(list)
    for begin in range(0, len(ids), _AT_ONCE):
        some = ",".join(ids[begin : begin + _AT_ONCE])
        answer = ask(
            *("sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"),
            *(f"--jobs={some}", f"--format={','.join(_FIELDS)}"),
            quiet=True,
        )
        if answer is None:
            return None
        for job, submitted, start, end, state in rows(answer, (r"\d\S*", *[r"[^|]*"] * 4)):
            if (since := since_epoch(submitted)) is not None:
                one = Allocation(since, since_epoch(start), since_epoch(end), state)
                found[job].append(one)
    return {job: sorted({*each}, key=lambda one: one.submitted) for job, each in found.items()}
