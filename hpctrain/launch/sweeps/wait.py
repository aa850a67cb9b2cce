"""Wait for the jobs of a sweep."""

import time

from hpctrain.launch.entry import Entry
from hpctrain.launch.output import say
from hpctrain.slurm.queue import Job, UnreachableError, queue_of

_POLL_S = (2.0, 30.0)
"""Seconds between two calls of `squeue`: at first, and at most."""


def wait(entries: list[Entry]) -> None:
    """Return when none of the runs is in the queue any more; each poll needs one `squeue`."""
    pause, printed = _POLL_S[0], -1
    while True:
        try:
            jobs = _jobs(entries)
        except UnreachableError as error:
            # The controller may be restarting. The jobs go on, so keep waiting for them.
            say(f"{error}; trying again", style="yellow")
            time.sleep(pause)
            continue
        if (ended := len(entries) - len(jobs)) != printed:
            say(f"{ended} of {len(entries)} runs have ended")
        printed = ended
        if not jobs:
            break
        time.sleep(pause)
        pause = min(_POLL_S[1], pause * 1.2)
    for entry in entries:
        entry.read_end()


def _jobs(entries: list[Entry]) -> list[Job]:
    """Return the job of each run that is in the queue; several runs may share one."""
    queue = queue_of(entry.before for entry in entries)
    return [queue[task] for task in (e.task for e in entries) if task and task in queue]
