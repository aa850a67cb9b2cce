"""`python -m hpctrain cancel RUN|SWEEP...`: stop runs for good; with --save they save first.

A job whose run has saved ends soon: the batch script cancels its own job (`engine.job.verdict`),
so that Slurm shows it as CANCELLED. FAILED would be wrong, and COMPLETED would start the jobs that
depend on it with `afterok`.
"""

import argparse
import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, LaunchError
from hpctrain.base.files.disk import is_own
from hpctrain.base.names.run_record import is_own_run
from hpctrain.base.terminal.terminal import printable
from hpctrain.cluster.slurm import queue
from hpctrain.cluster.slurm.queue import me
from hpctrain.commands.facts import Facts, gather
from hpctrain.commands.select import (
    add_arguments,
    are_folders,
    is_search,
    one_sweep,
    search_of,
    searches_of,
    select,
)
from hpctrain.commands.state import UNDER_WAY, State, state_of
from hpctrain.runs.state import stop_request
from hpctrain.runs.state.shared_job import has_others, runs_of


@dataclass
class _Step:
    """The action for one run."""

    run: Facts
    state: State  # before the action
    # "cancel" (scancel), "signal" (scancel --signal), "file" (only the stop request) or "skip".
    action: str
    message: str  # the action in words for the user

    @property
    def label(self) -> str:
        """The name of the run, with its job if Slurm is told."""
        job = f" ({self.run.job_id})" if self.action in ("cancel", "signal") else ""
        is_worker = (self.run.path / "worker.json").is_file()
        return f"{'worker ' * is_worker}{self.run.name}{job}"


def main(argv: list[str]) -> int:
    """Cancel runs and print one line for each; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain cancel",
        description="Stop runs for good: they leave the queue and are not requeued. A running run "
        "has Slurm's KillWait (usually 30 s) to save a checkpoint; with --save it has as long as "
        "it needs, and status shows when it has saved. To continue a run, use resume or the "
        "command that started it.",
    )
    add_arguments(parser, "or --all")
    parser.add_argument("--all", action="store_true", help="every run that is queued or running")
    parser.add_argument(
        "--save", action="store_true", help="let the runs save a checkpoint before they stop"
    )
    options = parser.parse_args(argv)
    if bool(options.runs) == options.all:
        raise ConfigError("cancel needs the runs or sweeps to stop, or --all (and not both)")
    runs = _without_trials(gather(select(options.dir, options.runs)), options)
    if blind := [run for run in runs if run.submission and not (run.is_final or run.scheduler)]:
        raise LaunchError(
            f"{blind[0].name}: squeue does not answer here, so the jobs to cancel are unknown; "
            "nothing was cancelled"
        )
    now = time.time()
    states = [(run, state_of(run, now)) for run in runs]
    together = {os.path.realpath(run.path) for run in runs}
    plan = [
        _Step(run, state, *_action(run, state, together, options.save)) for run, state in states
    ]
    if options.all or are_folders(options.runs):
        plan = [step for step in plan if step.state.name in UNDER_WAY]
    _carry_out(plan)
    if options.json:
        steps = [
            {"run": str(step.run.path), "job_id": step.run.job_id, "action": step.action}
            for step in plan
        ]
        print(json.dumps(steps))
        return 0
    for step in plan:
        print(printable(f"{step.label}: {step.message}"))
    if not plan:
        print("nothing is queued or running")
    return 0


def _without_trials(runs: list[Facts], options: argparse.Namespace) -> list[Facts]:
    """Return the runs, with the workers of the searches that are meant in place of their trials."""
    sweep, searches = one_sweep(options.dir, options.runs), list[Path]()
    if options.all or are_folders(options.runs):
        folders = map(Path, options.runs or [options.dir])
        searches = [search for folder in folders for search in searches_of(folder)]
    elif sweep is not None and is_search(sweep):
        searches, runs = [sweep], [run for run in runs if run.submission is None]
    if not searches:
        return runs
    workers = offered.worker_arrays
    for worker in itertools.chain.from_iterable(map(workers.local_workers, searches)):
        stop_request.write(worker, me())  # it ends after its trial, which is asked, too
    others = [run for run in runs if search_of(run.submission) not in searches]
    return others + [worker for each in searches for worker in workers.in_queue(each)]


def _carry_out(plan: list[_Step]) -> None:
    """Write the stop requests, which stay; then call `scancel` once for each kind of action."""
    for step in plan:
        # Before anything else: if Slurm is just requeuing the job, it finds the request later.
        if step.action != "skip":
            try:
                stop_request.write(step.run.path, me())
            except OSError as error:
                why = f"skipped: {step.run.path} cannot be written ({error.strerror})"
                step.action, step.message = "skip", why
    signalled = [step.run.job_id for step in plan if step.action == "signal"]
    ended = [step.run for step in plan if step.action == "cancel"]
    behind = [job for run in ended if run.job for job in run.job.behind]  # of their chains
    queue.cancel(signalled, "--signal=USR2")
    queue.cancel([*(run.job_id for run in ended), *behind])


def _action(run: Facts, state: State, together: set[str], save: bool) -> tuple[str, str]:
    """Return the action for a run, and its message; `together` are the paths of all that end."""
    attempt = run.attempt
    if state.name == "damaged":
        why = f"{state.reason}; if it has a job, squeue shows it and scancel ends it"
        return "skip", f"skipped: {why}"
    if state.name not in UNDER_WAY:
        return "skip", f"{state.name}, nothing to do"
    if not (is_own_run(run.path) or is_own(run.path / "worker.json")):
        return "skip", f"{state.name}, skipped: it is the run of another user, who can cancel it"
    submission = run.submission if run.job is not None else None
    if submission and os.path.realpath(run.path) not in runs_of(submission):
        if search_of(submission):
            return "file", "asked to save and stop; its worker goes on with other trials"
        return "skip", f"skipped: job {run.job_id} is not of this run, as its list of runs says"
    if run.job is not None and has_others(run.record, together):
        # The batch script leaves it out of the job, or rank 0 reads the request.
        asked = "asked to save and stop, within seconds" if state.name == "running" else "cancelled"
        return "file", f"{asked}; job {run.job_id} goes on with its other runs"
    # A job of slurm/train.sbatch has no submission in run.json; the job id is in its attempt.
    template = attempt.launcher == "slurm" and not run.submission
    if run.job is not None or (template and run.job_id and shutil.which("scancel")):
        # Before the attempt has begun there is nothing to save, and SIGUSR2 would only kill it.
        if save and state.name == "running" and run.recorded_state == "running":
            return "signal", "asked to save and stop"
        return "cancel", f"cancelled, was {state.name}"
    if run.recorded_state != "running":
        return "skip", "being submitted just now: cancel again in a moment"
    return "file", f"asked to save and stop, on {attempt.host}, within seconds"
