"""The states of a sweep's runs: runs that are finished or under way are not submitted again."""

from __future__ import annotations

import os

from msgspec.structs import replace

from hpctrain.launch.arrays import Entry
from hpctrain.slurm import queue
from hpctrain.slurm.queue import Queue, queue_of


def set_states(entries: list[Entry], jobs: Queue) -> None:
    """Set `state` of the runs that need not be submitted: finished, under way, or given twice.

    The state of the others becomes empty. A finished run that shall be repeated gets `again`, and a
    waiting run that shall be replaced gets `replaces`. `before` of the runs must have been read
    after the queue.
    """
    seen: set[str] = set()
    for entry in entries:
        entry.state = entry.replaces = ""
        path = os.path.realpath(entry.run.path)
        record = entry.before
        state, rerun = record.state, entry.config.launch.rerun
        task, job = jobs.task_of(record), jobs.job_of(record)
        if path in seen:
            entry.state = "the same run as above"
        elif state == "finished" and rerun != "all":
            entry.state = "finished before"
        # A job that Slurm requeues is COMPLETING, like one that has ended, until it is PENDING.
        elif job and rerun == "queued" and job.state == "PENDING":
            entry.replaces = job.id
        elif job and not (job.is_ending and state in ("failed", "finished")):
            entry.state, entry.job = f"{job.state.lower()} already", job.id
            entry.task = task
        elif entry.run.is_locked():
            entry.state = "running elsewhere"
        elif state == "finished":
            entry.again = True
        elif rerun == "none" and record.attempts:
            entry.state = f"{state} before"
        seen.add(path)


def replace_waiting(todo: list[Entry]) -> list[Entry]:
    """Cancel the waiting jobs of `launch.rerun=queued`; return what can be submitted now."""
    replaced = [entry for entry in todo if entry.replaces]
    if not replaced:
        return todo
    queue.cancel_waiting(entry.replaces for entry in replaced)
    still = {job.id: job for job in queue_of(entry.before for entry in replaced).values()}
    for entry in replaced:
        if (job := still.get(entry.replaces)) is not None:
            entry.state, entry.job = f"{job.state.lower()} already", job.id
        elif entry.before.state == "queued":
            entry.before = replace(entry.before, state="created")
    return [entry for entry in todo if not entry.state]
