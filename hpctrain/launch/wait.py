"""Wait for a sweep's jobs, and submit what there was no room for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpctrain.launch.arrays import Entry
from hpctrain.launch.queue import Job, UnreachableError
from hpctrain.launch.run_state import queue_of
from hpctrain.launch.table import say

POLL_S = (2.0, 30.0)
"""Between two questions to the scheduler: at first, and after a while."""


def wait(
    entries: list[Entry], submit: Callable[[list[Entry]], list[Entry]], left: list[Entry]
) -> None:
    """Return when none of the runs is in the queue any more; one `squeue` a poll for all.

    Args:
        entries: the whole sweep's.
        submit: gives entries to the scheduler and returns those that there is no room for.
        left: what waits for room.
    """
    pause, most, told = POLL_S[0], sum(entry.task is not None for entry in entries), -1
    with Progress(
        TextColumn("waiting for"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    ) as progress:
        shown = progress.add_task("", total=len(entries), note="")
        while True:
            try:
                jobs = _jobs(entries)
                if left and (len(jobs) < most or not jobs):
                    left = submit(left)
                    jobs = _jobs(entries)
                    most = len(jobs)
            except UnreachableError as error:
                # A controller that restarts is no reason to lose the runs that it will remember.
                say(f"{error}; asking again", style="yellow")
                time.sleep(pause)
                continue
            running = sum(job.state == "RUNNING" for job in jobs)
            ended = len(entries) - len(jobs) - len(left)
            note = f"{running} running, {len(jobs) - running + len(left)} waiting"
            progress.update(shown, completed=ended, note=note)
            if ended != told and progress.disable:
                say(f"{ended} of {len(entries)} runs have ended")
            told = ended
            if not jobs and not left:
                break
            time.sleep(pause)
            pause = min(POLL_S[1], pause * 1.2)
    for entry in entries:
        entry.state = entry.run.read().get("state", entry.state)


def _jobs(entries: list[Entry]) -> list[Job]:
    """Those in the queue."""
    queue = queue_of(entries)
    return [queue[task] for task in {e.task for e in entries if e.task} if task in queue]
