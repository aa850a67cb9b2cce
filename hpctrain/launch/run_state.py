"""Where the runs of a sweep stand: what is done or under way is not submitted again."""

from __future__ import annotations

import os

from hpctrain.launch.arrays import Entry
from hpctrain.launch.queue import Job, Task, me, queued


def queue_of(entries: list[Entry]) -> dict[Task, Job]:
    """The queue, of whoever may have a job of these runs in it: their last submitters, and we.

    Args:
        entries: with what run.json said before, in `before`.

    Raises:
        UnreachableError: the controller does not answer.
    """
    asked = (entry.before.get("submission") for entry in entries)
    return queued({me(), *(str(submission["user"]) for submission in asked if submission)})


def mark(entries: list[Entry], jobs: dict[Task, Job]) -> None:
    """Give a state to what need not be done: finished, under way, or here twice.

    Args:
        entries: with what run.json said after the queue was asked, in `before`.
        jobs: the queue.
    """
    seen: set[str] = set()
    by_id = {job.id: task for task, job in jobs.items()}
    for entry in entries:
        entry.state = ""
        place = os.path.realpath(entry.run.path)
        known = entry.before
        asked = known.get("submission") or {}
        task: Task | None = (asked.get("script", ""), asked.get("task", -1))
        state, rerun = known.get("state", ""), entry.config.launch.rerun
        # A job of slurm/train.sbatch is known by its number, once it has begun.
        if task not in jobs and state in ("running", "interrupted"):
            task = by_id.get(known["attempts"][-1].get("job_id", ""))
        job = jobs.get(task) if task else None
        if place in seen:
            entry.state = "the same run as above"
        elif state == "finished" and rerun != "all":
            entry.state = "finished before"
        # One that Slurm has requeued looks as if it ended, until it waits again.
        elif job and not (job.is_ending and state in ("failed", "finished")):
            entry.state, entry.job = f"{job.state.lower()} already", job.id
            entry.task = task
        elif entry.run.is_locked():
            entry.state = "running elsewhere"
        elif state == "finished":
            entry.again = True
        elif rerun == "none" and known.get("attempts"):
            entry.state = f"{state} before"
        seen.add(place)
