"""Determine the state of a run, for the user, from the facts. `state_of` reads no files.

    created      frozen, but never submitted or started
    queued       in the queue of Slurm, not started yet
    running      trains, starts or ends
    requeued     was stopped and waits in the queue to continue
    interrupted  stopped and saved, not in the queue; can be resumed
    paused       saved at the step that was asked for; can be resumed
    cancelled    stopped by somebody before it could save
    failed       ended with an exception
    lost         was queued or running, but there is no job or process; Slurm may say why
    finished     all steps are done
    damaged      run.json cannot be read

run.json alone does not give the state: a process that is killed cannot update it.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hpctrain.base.names.metric_names import main_metric
from hpctrain.base.processes.causes import ANOTHER_RANK, cause_of, named, one_line
from hpctrain.base.units import duration
from hpctrain.cluster.slurm.queue import since_epoch
from hpctrain.commands.facts import Facts, gather

# In the order of a long table: states that need the user's attention come first.
STATES = (
    *("failed", "lost", "damaged", "cancelled", "running", "interrupted"),
    *("requeued", "queued", "created", "paused", "finished"),
)
UNDER_WAY = ("queued", "running", "requeued")

_WAITING = {"PENDING", "EXPEDITING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_WAITING |= {"RESV_DEL_HOLD"}
_SUBMITTING_S = 60.0  # run.json says queued a little before sbatch has answered
_ALIVE_S = 60.0  # a process whose heartbeat is older than this counts as dead
_STALLED_S = 600.0  # without a step, if the time of a step is not known yet
_LEAST_STALLED_S, _STALLED_STEPS = 60.0, 10


@dataclass(frozen=True)
class State:
    """A state of the table above, and the reason in one line."""

    name: str
    reason: str = ""


def state_of(run: Facts, now: float) -> State:
    """Return the state of a run at the time `now`, in seconds since the epoch."""
    state = _state(run, now)
    spent = run.restarted if state.name in ("running", "requeued", "interrupted") else ""
    hang = run.hang if state.name not in ("requeued", "queued") else None
    # The other ranks' errors only follow from it, and so do they stand behind it.
    told = hang is not None and hang.sentence not in state.reason
    cause = hang.sentence if hang and told and run.progress.stepped <= hang.time else ""
    said = [cause, state.reason, spent, *run.record.noted()]
    return replace(state, reason="; ".join(filter(None, said)))


def states_of(paths: Iterable[Path]) -> list[tuple[Facts, State]]:
    """Gather the facts about runs, and return each run with its state now."""
    runs, now = gather(paths), time.time()
    return [(run, state_of(run, now)) for run in runs]


def _state(run: Facts, now: float) -> State:
    if run.damage:
        return State("damaged", run.damage)
    if run.recorded_state == "finished":
        return State("finished", run.attempt.reason)  # a metric that is NaN
    if run.recorded_state == "paused":  # its job may be a worker's, which trains another run
        return State("paused", f"at step {run.record.paused_at}, as asked")
    if run.job is not None and (state := _in_the_queue(run, now)):
        return state
    if run.recorded_state in ("created", "failed", "interrupted"):
        return _at_rest(run)
    return _gone(run, now)


def ended_for_good(paths: list[Path]) -> dict[Path, tuple[str, str]]:
    """Return MLflow's status and the reason for the runs whose jobs Slurm has no more.

    A run without a job is left out: its process may be alive on another host.
    """
    found = {}
    for run, state in states_of(paths):
        if run.held or not (run.scheduler or run.ended):
            continue
        if state.name in ("failed", "lost", "cancelled", "interrupted", "paused"):
            status = "FAILED" if state.name == "failed" else "KILLED"
            found[run.path] = status, f"{state.name}: {state.reason}"
    return found


def step(run: Facts) -> int | None:
    """Return the last step that is known to be done; None if none is."""
    made = [step for step in (run.progress.step, run.left_at) if step is not None]
    sources = (run.record.reached, max(made, default=None), run.attempt.step)
    return next((step for step in sources if step is not None), None)


def eta_s(run: Facts, now: float) -> float | None:
    """Return the seconds until the last step at the present speed; None if the speed is unknown."""
    left = run.progress.left_s
    if left is None or not _is_of_this_attempt(run) or _stalled_s(run, now) is not None:
        return None
    return max(0.0, left - max(0.0, now - run.progress.time))


def metric(run: Facts) -> tuple[str, float] | None:
    """Return the name and the last value of the run's main metric; None without one."""
    values = run.metrics
    name = main_metric(run.progress.metric, values)
    return (name, float(values[name])) if name else None


def best(run: Facts) -> tuple[float, int] | None:
    """Return the best value of the main metric and its step; None if no direction is known."""
    found = run.progress.best
    return None if found is None else (found.value, found.step)


def _in_the_queue(run: Facts, now: float) -> State | None:
    job = run.job
    assert job is not None
    if job.state in _WAITING:
        reason = job.reason if job.reason != "None" else job.state.lower()
        begin = since_epoch(job.start)
        if job.needs:
            reason += f": {job.needs}"
        elif begin is not None and begin > now:
            reason += f", to start about {datetime.fromtimestamp(begin):%d %b %H:%M}"
        if run.link:
            reason = f"{run.link} waits: {reason}"
        is_new = run.recorded_state in ("created", "queued")
        return State("queued" if is_new else "requeued", reason)
    if job.is_ending:
        return _ending(run)
    if job.needs:
        return State("running", job.needs)
    if run.recorded_state in ("created", "queued"):
        return State("running", "starting")
    if run.recorded_state == "running":
        return _running(run, now)
    # The attempt has ended, but there is a running job: either it was restarted, or it is ending.
    job_start, attempt_end = since_epoch(job.start), run.attempt.ended or math.inf
    if job_start is not None and job_start > attempt_end:
        return State("running", "starting")
    return _ending(run)


def _ending(run: Facts) -> State | None:
    """Return the state while the job is ending; it may be back in the queue in a moment."""
    if run.recorded_state == "interrupted":
        return State("running", f"saved at step {_step_of(run)}, ending")
    return State("running", "ending") if run.recorded_state in ("queued", "running") else None


def _at_rest(run: Facts) -> State:
    """Return the state of a run that has recorded its own end and is not in the queue."""
    if run.recorded_state == "created":
        return State("created")
    if run.recorded_state == "failed":
        error = one_line(run.attempt.error)
        # Rank 0 writes run.json; its own error may only say that another rank has died.
        follows = cause_of(error) is ANOTHER_RANK
        told = f"another rank failed: {error}" if follows else named(run.attempt.cause, error)
        return State("failed", told)
    # A job of slurm/train.sbatch is not looked up with squeue: only sacct shows that it waits.
    word = "" if run.ended is None else _word(run.ended.state)
    if run.ended is not None and word in _WAITING and not run.submission:
        return State("requeued", run.ended.reason)
    cause = named(run.attempt.cause, run.attempt.reason)
    if run.stop_request is not None:
        cause = f"cancelled by {run.stop_request.by}"
    elif run.ended is not None and word not in ("COMPLETED", "FAILED"):
        cause = f"{cause}; {run.ended.state}"
    # What the user has stopped is not waited for.
    asked = run.stop_request is not None or cause == "SIGINT" or word == "CANCELLED"
    if run.attempt.launcher == "slurm" and (run.scheduler or run.ended) and not asked:
        cause = f"{cause}; no job waits: `resume` goes on"
    return State("interrupted", f"saved at step {_step_of(run)}, {cause}")


def _gone(run: Facts, now: float) -> State:
    """Return the state of a run without a job in squeue, if run.json says queued or running."""
    word = "" if run.ended is None else _word(run.ended.state)
    submitted_s = now - run.record.submitted
    fresh = _is_of_this_attempt(run) and now - run.progress.time < _ALIVE_S
    beats = fresh and not (run.scheduler or run.died_here)
    if run.recorded_state == "running" and (run.held or beats):
        return _running(run, now)
    if run.ended is not None and not run.submission and word in ("RUNNING", *_WAITING):
        if run.recorded_state == "queued":
            return State("queued", run.ended.reason)
        return _running(run, now) if word == "RUNNING" else State("requeued", run.ended.reason)
    if run.recorded_state == "queued" and run.unanswered and submitted_s < _SUBMITTING_S:
        return State("queued", "being submitted")
    if run.stop_request is not None:
        return State("cancelled", f"by {run.stop_request.by}{_reached(run)}")
    if run.ended is not None:
        code = f", exit code {run.ended.exit_code}" if word == "FAILED" else ""
        name = "cancelled" if word == "CANCELLED" else "lost"
        return State(name, f"{run.ended.state}{code}{_reached(run)}")
    if run.submission and not run.scheduler:
        return State(run.recorded_state, f"says run.json; squeue was not asked{_reached(run)}")
    if run.recorded_state != "running":
        return State("lost", f"no longer in the queue{_reached(run)}")
    where = f" on {run.attempt.host}" if run.attempt.host else ""
    return State("lost", f"no process holds it{where}{_reached(run)}")


def _running(run: Facts, now: float) -> State:
    if run.stop_request is not None:
        return State("running", f"asked to stop by {run.stop_request.by}")
    if not _is_of_this_attempt(run):
        return State("running", "starting")
    if (since_s := _stalled_s(run, now)) is not None:
        because = f": {run.progress.doing} is under way" if run.progress.doing else ""
        return State("running", f"no step for {duration(since_s)}{because}")
    return State("running")


def _stalled_s(run: Facts, now: float) -> float | None:
    """Return the seconds since the last step, if they are more than this run usually takes."""
    # Both times are of the clock of the training's host, which may differ from the clock here.
    seen, limit_s = run.progress, _STALLED_S
    since_s = max(seen.time - seen.stepped, now - seen.time)
    if seen.step_s is not None:
        limit_s = max(_LEAST_STALLED_S, _STALLED_STEPS * seen.step_s, 2 * seen.longest_step_s)
    return since_s if since_s > limit_s else None


def _is_of_this_attempt(run: Facts) -> bool:
    return run.progress.time >= (run.attempt.started or math.inf)


def _step_of(run: Facts) -> str:
    return "?" if run.attempt.step is None else str(run.attempt.step)


def _reached(run: Facts) -> str:
    made = step(run)
    return "" if made is None else f", after step {made}"


def _word(state: str) -> str:
    """Return the first word: `CANCELLED` of `CANCELLED by 1000`."""
    return state.split()[0] if state else ""
