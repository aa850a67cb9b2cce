"""`python -m hpctrain cancel RUN|SWEEP...`: stop runs for good, saved first if wished."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.commands.facts import Facts, gather
from hpctrain.commands.select import add_arguments, select
from hpctrain.commands.state import UNDER_WAY, State, judge
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.environment import clean_environment
from hpctrain.launch.queue import me
from hpctrain.runs import stop_request as stopfile

# What `scancel` says of a job that has ended since we looked: then all is as it was asked for.
_GONE = ("Invalid job id specified", "already completing or completed")


@dataclass(frozen=True)
class Step:
    """What is done to one run.

    Attributes:
        how: "cancel" or "signal" by Slurm's word, "terminate" the process here, "file" only, or
            "skip".
        told: what people are told of it.
    """

    run: Facts
    state: State
    how: str
    told: str


def main(argv: list[str]) -> int:
    """Cancel, and print one line a run."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain cancel",
        description="Stop runs: they leave the queue and do not come back by themselves. "
        "What has begun gets Slurm's KillWait (30 s as a rule) to save; with --save as long as it "
        "takes. The same command that started a run, or resume, lets it go on.",
    )
    add_arguments(parser, "or --all")
    parser.add_argument("--all", action="store_true", help="every run that is queued or running")
    parser.add_argument("--save", action="store_true", help="let runs save a checkpoint first")
    options = parser.parse_args(argv)
    if bool(options.runs) == options.all:
        raise ConfigError("cancel needs the runs or sweeps to stop, or --all (and not both)")
    runs = gather(select(options.dir, options.runs))
    if blind := [run for run in runs if run.submission and not (run.is_final or run.scheduler)]:
        raise LaunchError(
            f"{blind[0].name}: squeue does not answer here, so it cannot be told which jobs to "
            "cancel; nothing was"
        )
    now = time.time()
    plan = [_step(run, judge(run, now), save=options.save) for run in runs]
    if options.all:
        plan = [step for step in plan if step.state.name in UNDER_WAY]
    carry_out(plan)
    if options.json:
        print(
            json.dumps(
                [
                    {"run": str(step.run.path), "job_id": step.run.job_id, "action": step.how}
                    for step in plan
                ]
            )
        )
        return 0
    for step in plan:
        job = f" ({step.run.job_id})" if step.how in ("cancel", "signal") else ""
        print(f"{step.run.name}{job}: {step.told}")
    if not plan:
        print("nothing is queued or running")
    return 0


def carry_out(plan: list[Step]) -> None:
    """Write the wishes, then one `scancel` a kind.

    Raises:
        LaunchError: Slurm refused; the wishes stand.
    """
    for step in plan:
        # First of all: a job that Slurm requeues in this moment finds it when it is back.
        if step.how != "skip":
            stopfile.write(step.run.path, me())
    for step in plan:
        if step.how == "terminate":
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(int(step.run.attempt["pid"]), signal.SIGTERM)
    _scancel("--signal=USR2", *jobs_of(step.run.job_id for step in plan if step.how == "signal"))
    _scancel(*jobs_of(step.run.job_id for step in plan if step.how == "cancel"))


def jobs_of(ids: Iterable[str]) -> list[str]:
    """The ids as `scancel` takes them, one word an array: `123_[0-3,7]`."""
    arrays: dict[str, list[int]] = defaultdict(list)
    plain = []
    for job in ids:
        array, _, task = job.partition("_")
        if task:
            arrays[array].append(int(task))
        else:
            plain.append(job)
    for array, numbers in arrays.items():
        ranges: list[list[int]] = []
        for number in sorted(numbers):
            if ranges and number == ranges[-1][1] + 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        inside = ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)
        plain.append(f"{array}_[{inside}]")
    return plain


def _step(run: Facts, state: State, *, save: bool) -> Step:
    attempt = run.attempt
    if state.name == "damaged":
        told = f"left: {state.reason}; if it has a job, squeue shows it and scancel ends it"
        return Step(run, state, "skip", told)
    if state.name not in UNDER_WAY:
        return Step(run, state, "skip", f"{state.name}, nothing to do")
    # A job of slurm/train.sbatch has no submission of ours: its attempt names it.
    alone = attempt.get("launcher") == "slurm" and not run.submission and shutil.which("scancel")
    if run.job is not None or (alone and run.job_id):
        # Before the attempt has begun nothing could be saved, and USR2 would only kill it.
        if save and state.name == "running" and run.said == "running":
            return Step(run, state, "signal", "asked to save and stop")
        return Step(run, state, "cancel", f"cancelled, was {state.name}")
    if run.said != "running":
        return Step(run, state, "skip", "being submitted just now: cancel again in a moment")
    if run.held and attempt["host"] == socket.gethostname() and not save:
        told = f"process {attempt['pid']} asked to save and stop"
        return Step(run, state, "terminate", told)
    return Step(run, state, "file", f"asked to save and stop, on {attempt['host']}, within seconds")


def _scancel(*arguments: str) -> None:
    jobs = [word for word in arguments if not word.startswith("-")]
    if not jobs:
        return
    done = subprocess.run(
        ["scancel", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=clean_environment(),
    )
    said = [line for line in done.stderr.splitlines() if not any(word in line for word in _GONE)]
    if said:
        raise LaunchError(f"scancel {' '.join(jobs)}: {'; '.join(said)}")
