"""Wait for the jobs of a sweep; submit the runs that were over the submit limit."""

import time
from collections.abc import Callable

from hpctrain.cluster.slurm.queue import Job, UnreachableError, queue_of
from hpctrain.launch.entry import Entry
from hpctrain.launch.output import say

_POLL_S = (2.0, 30.0)
"""Seconds between two calls of `squeue`: at first, and at most."""


def wait(
    entries: list[Entry], submit: Callable[[list[Entry]], list[Entry]], left: list[Entry]
) -> None:
    """Return when none of the runs is in the queue any more.

    Each poll needs one `squeue` for all runs. `submit` returns the runs that are over the submit
    limit, as are those that are `left`.
    """
    pause, printed = _POLL_S[0], -1
    most = sum(entry.task is not None for entry in entries)  # jobs that the limit has allowed
    while True:
        try:
            jobs = _jobs(entries)
            if left and (len(jobs) < most or not jobs):
                left = submit(left)
                jobs = _jobs(entries)
                most = len(jobs)
        except UnreachableError as error:
            # The controller may be restarting. The jobs go on, so keep waiting for them.
            say(f"{error}; trying again", style="yellow")
            time.sleep(pause)
            continue
        if (ended := len(entries) - len(jobs) - len(left)) != printed:
            say(f"{ended} of {len(entries)} runs have ended")
        printed = ended
        if not jobs and not left:
            break
        time.sleep(pause)
        pause = min(_POLL_S[1], pause * 1.2)
    for entry in entries:
        entry.read_end()


def _jobs(entries: list[Entry]) -> list[Job]:
    """Return the job of each run that is in the queue; several runs may share one."""
    queue = queue_of(entry.before for entry in entries)
    return [queue[task] for task in (e.task for e in entries) if task and task in queue]
