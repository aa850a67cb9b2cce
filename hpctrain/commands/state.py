"""What state a run is in, for people: one pure function of what is known.

    created      frozen, never submitted or started
    queued       Slurm has it; it has not begun
    running      it trains, begins or ends
    requeued     it was stopped and waits in the queue to go on
    interrupted  stopped and saved, not queued: to be resumed
    cancelled    somebody stopped it before it could save
    failed       it raised
    lost         it was queued or running, and now nobody knows it; Slurm's word is the reason
    finished
    damaged      run.json cannot be read

run.json alone cannot tell: a process that is killed writes nothing down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

from hpctrain.commands.facts import Facts
from hpctrain.commands.fault import is_of_another_rank

# In the order of a long table: what wants attention comes first.
STATES = (
    *("failed", "lost", "damaged", "cancelled", "running", "interrupted"),
    *("requeued", "queued", "created", "finished"),
)
UNDER_WAY = ("queued", "running", "requeued")

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_SUBMITTING_S = 60.0  # run.json says queued a little before sbatch has answered
_ALIVE_S = 60.0  # without a word for so long a process is not believed to live
_STALLED_S = 600.0


@dataclass(frozen=True)
class State:
    """A state, and why it is that, in one line."""

    name: str
    reason: str = ""


def judge(run: Facts, now: float) -> State:
    """The state of a run at the time `now`."""
    if run.damage:
        return State("damaged", run.damage)
    if run.said == "finished":
        return State("finished")
    if run.job is not None and (state := _in_the_queue(run, now)):
        return state
    if run.said in ("created", "failed", "interrupted"):
        return _at_rest(run)
    return _gone(run, now)


def step(run: Facts) -> int | None:
    """The last step that is known to be made."""
    made = (run.record.get("result") or {}, run.progress, run.attempt)
    return next((int(facts["step"]) for facts in made if "step" in facts), None)


def eta_s(run: Facts, now: float) -> float | None:
    """Seconds until the last step at the present speed, for a run that trains."""
    rate = run.progress.get("steps_per_s")
    if not rate or not _is_of_this_attempt(run):
        return None
    left = (run.progress["max_steps"] - run.progress["step"]) / rate
    since = max(0.0, now - float(run.progress["time"]))
    return max(0.0, float(left) - since)


def metric(run: Facts) -> tuple[str, float] | None:
    """The metric that people watch, and its last value."""
    values = {**run.progress.get("metrics", {}), **(run.record.get("result") or {})}
    names: list[str] = [run.progress.get("metric", ""), "val/accuracy", "val/loss", "train/loss"]
    return next(((name, float(values[name])) for name in names if name in values), None)


def _in_the_queue(run: Facts, now: float) -> State | None:
    job = run.job
    assert job is not None
    if job.state in _WAITING:
        reason = job.reason if job.reason != "None" else job.state.lower()
        begin = _time(job.start)
        if begin is not None and begin > now:
            reason += f", to start about {datetime.fromtimestamp(begin):%d %b %H:%M}"
        return State("queued" if run.said in ("created", "queued") else "requeued", reason)
    if job.is_ending:
        return _leaving(run)
    if run.said in ("created", "queued"):
        return State("running", "starting")
    if run.said == "running":
        return _running(run, now)
    # The attempt has ended, but not its job: is this the next start, or the end of that one?
    begun, left = _time(job.start), run.attempt.get("ended", math.inf)
    if begun is not None and begun > left:
        return State("running", "starting")
    return _leaving(run)


def _leaving(run: Facts) -> State | None:
    """A job that ends may be back in the queue in a moment: its run is not yet at rest."""
    if run.said == "interrupted":
        return State("running", f"saved at step {run.attempt.get('step', '?')}, ending")
    return State("running", "ending") if run.said in ("queued", "running") else None


def _at_rest(run: Facts) -> State:
    """Its own last word, where the queue has no other."""
    if run.said == "created":
        return State("created")
    if run.said == "failed":
        error = " ".join(str(run.attempt.get("error", "")).split())
        # Rank 0 has written it down, and only noticed that another one was gone.
        return State(
            "failed", f"another rank failed: {error}" if is_of_another_rank(error) else error
        )
    # A job of slurm/train.sbatch is no array task: only sacct tells that it waits.
    if run.ended is not None and _word(run.ended.state) in _WAITING and not run.submission:
        return State("requeued", run.ended.reason)
    cause = str(run.attempt.get("reason", ""))
    if run.wish is not None:
        cause = f"cancelled by {run.wish['by']}"
    elif run.ended is not None and _word(run.ended.state) not in ("COMPLETED", "FAILED"):
        cause = f"{cause}; {run.ended.state}"
    return State("interrupted", f"saved at step {run.attempt.get('step', '?')}, {cause}")


def _gone(run: Facts, now: float) -> State:
    """Said to be queued or running, but not in the queue that we can see."""
    word = "" if run.ended is None else _word(run.ended.state)
    asked_s = now - float(run.submission.get("time", 0.0))
    fresh = _is_of_this_attempt(run) and now - float(run.progress["time"]) < _ALIVE_S
    if run.said == "running" and (run.held or (fresh and not run.scheduler)):
        return _running(run, now)
    if run.ended is not None and not run.submission and word in ("RUNNING", *_WAITING):
        if run.said == "queued":
            return State("queued", run.ended.reason)
        return _running(run, now) if word == "RUNNING" else State("requeued", run.ended.reason)
    if run.said == "queued" and run.unanswered and asked_s < _SUBMITTING_S:
        return State("queued", "being submitted")
    if run.wish is not None:
        return State("cancelled", f"by {run.wish['by']}{_reached(run)}")
    if run.ended is not None:
        code = f", exit code {run.ended.exit_code}" if word == "FAILED" else ""
        name = "cancelled" if word == "CANCELLED" else "lost"
        return State(name, f"{run.ended.state}{code}{_reached(run)}")
    if run.submission and not run.scheduler:
        return State(run.said, f"says run.json; squeue was not asked{_reached(run)}")
    where = f" on {run.attempt['host']}" if "host" in run.attempt else ""
    silent = f"no process holds it{where}" if run.said == "running" else "no longer in the queue"
    return State("lost", silent + _reached(run))


def _running(run: Facts, now: float) -> State:
    if run.wish is not None:
        return State("running", f"asked to stop by {run.wish['by']}")
    if not _is_of_this_attempt(run):
        return State("running", "starting")
    # Both times are the training's own: its clock may differ from ours.
    still_s = float(run.progress["time"]) - float(run.progress["stepped"])
    silent_s = now - float(run.progress["time"])
    if max(still_s, silent_s) > _STALLED_S:
        return State("running", f"no step for {duration(max(still_s, silent_s))}")
    return State("running")


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`: as exact as people want it."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _is_of_this_attempt(run: Facts) -> bool:
    began = float(run.attempt.get("started", math.inf))
    return float(run.progress.get("time", -math.inf)) >= began


def _reached(run: Facts) -> str:
    made = step(run)
    return "" if made is None else f", after step {made}"


def _word(state: str) -> str:
    """`CANCELLED` of `CANCELLED by 1000`."""
    return state.split()[0] if state else ""


def _time(iso: str) -> float | None:
    """Slurm's local time; None where it says `N/A` or `Unknown`."""
    try:
        return datetime.fromisoformat(iso).timestamp()
    except ValueError:
        return None
