"""Wait for a sweep's jobs, and submit what there was no room for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpctrain.launch.arrays import Entry
from hpctrain.launch.queue import UnreachableError, me, queued
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
    jobs = {entry.task for entry in entries if entry.task}
    asked = [entry.run.read().get("submission") or {} for entry in entries]
    users = {me(), *(str(one["user"]) for one in asked if one)}
    pause, most, ended = POLL_S[0], len(jobs), -1
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
                known = queued(users)
                here = {task for task in jobs if task in known}
                if left and (len(here) < most or not here):
                    left = submit(left)
                    jobs = {entry.task for entry in entries if entry.task}
                    known = queued(users)
                    here = {task for task in jobs if task in known}
                    most = len(here)
            except UnreachableError as error:
                # A controller that restarts is no reason to lose the runs that it will remember.
                say(f"{error}; asking again", style="yellow")
                time.sleep(pause)
                continue
            running = sum(known[task].state == "RUNNING" for task in here)
            progress.update(
                shown,
                completed=len(entries) - len(here) - len(left),
                note=f"{running} running, {len(here) - running + len(left)} waiting",
            )
            if len(entries) - len(here) - len(left) != ended:
                ended = len(entries) - len(here) - len(left)
                if progress.disable:
                    say(f"{ended} of {len(entries)} runs have ended")
            if not here and not left:
                break
            time.sleep(pause)
            pause = min(POLL_S[1], pause * 1.2)
    for entry in entries:
        entry.state = entry.run.read().get("state", entry.state)
