"""Wait for the jobs of a sweep, and submit the runs over the submit limit; or run its runs here.

1 of 4 starts: digits-5f764f66 lr=0.001 seed=0
1 of 4 is finished after 0:00:12: digits-5f764f66 lr=0.001 seed=0, val/accuracy 0.9712
"""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from hpctrain.base.terminal.console import say
from hpctrain.cluster.slurm.patience import WATCH_S
from hpctrain.cluster.slurm.queue import Job, UnreachableError, queue_of
from hpctrain.launch.entry import Entry
from hpctrain.launch.executors import LocalExecutor
from hpctrain.launch.jobs import LocalRunJob
from hpctrain.runs.sweep_overrides import label

_POLL_S = (2.0, 30.0)
"""Seconds between two looks at the run directories: at first, and at most."""


def wait(
    entries: list[Entry], submit: Callable[[list[Entry]], list[Entry]], left: list[Entry]
) -> None:
    """Return when none of the runs is in the queue any more.

    What the run directories say costs the scheduler nothing. It is asked with one `squeue` for all
    runs, each WATCH_S seconds and when all of them seem to have ended. `submit` returns the runs
    that are over the submit limit, as are those that are `left`.
    """
    pause, printed = _POLL_S[0], -1
    most = sum(entry.task is not None for entry in entries)  # jobs that the limit has allowed
    finished, jobs, asked = set[Path](), list[Job](), float("-inf")
    while True:
        ended = _ended(entries, finished)
        try:
            if time.monotonic() - asked >= WATCH_S or ended + len(left) == len(entries):
                jobs, asked = _jobs(entries), time.monotonic()
                if left and (len(jobs) < most or not jobs):
                    left = submit(left)
                    jobs = _jobs(entries)
                    most = len(jobs)
                ended = len(entries) - len(jobs) - len(left)
        except UnreachableError as error:
            # The controller may be restarting. The jobs go on, so keep waiting for them.
            say(f"{error}; trying again", style="yellow")
            time.sleep(pause)
            continue
        if ended > printed:
            say(f"{ended} of {len(entries)} runs have ended")
            printed = ended
        if not jobs and not left:
            break
        time.sleep(pause)
        pause = min(_POLL_S[1], pause * 1.2)
    for entry in entries:
        entry.read_end()


def _ended(entries: list[Entry], finished: set[Path]) -> int:
    """Return how many runs say that they have ended; `finished` are those that need no look."""
    count = 0
    for entry in entries:
        if entry.run.path not in finished:
            state = entry.run.read().state
            finished |= {entry.run.path} if state == "finished" else set()
            count += state == "failed"  # it may come back
    return count + sum(entry.run.path in finished for entry in entries)


def _jobs(entries: list[Entry]) -> list[Job]:
    """Return the job of each run that is in the queue; several runs may share one."""
    queue = queue_of(entry.before for entry in entries)
    return [queue[task] for task in (e.task for e in entries) if task and task in queue]


def run_here(entries: list[Entry]) -> None:
    """Run the runs on this machine, one after the other, and say when each starts and ends.

    It sets their `state`, `handle` and `job`. After Ctrl-C it raises KeyboardInterrupt when the
    ranks have saved.
    """
    for number, entry in enumerate(entries, 1):
        begun, place = time.monotonic(), f"{number} of {len(entries)}"
        say(f"{place} starts: {_name(entry)}")
        _run(entry)
        entry.read_end(otherwise="lost")
        took, value = timedelta(seconds=round(time.monotonic() - begun)), entry.metric()
        metric = "" if value is None else f", {entry.config.metric} {value:.4g}"
        say(f"{place} is {entry.state} after {took}: {_name(entry)}{metric}")


def _run(entry: Entry) -> None:
    executor = LocalExecutor(entry.run.path, entry.config.launch, entry.code)
    entry.handle = job = executor.submit(LocalRunJob, entry.run, entry.config.metric)
    entry.job = job.job_id
    try:
        job.wait()
    except KeyboardInterrupt:
        job.cancel()
        job.wait()
        raise


def _name(entry: Entry) -> str:
    return f"{entry.run.name} {label(entry.swept)}".rstrip()
