"""Where a run's output is: the ranks' logs, and what its batch script printed.

    Slurm             RUN/logs/123_4.rank0.log, and array-N/batch/123_4.log of its sweep
    submitit's local  RUN/logs/JOB_0_log.out
    in a terminal     nowhere

A job that Slurm restarts appends to its files.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.commands.facts import Facts

_SLURM = re.compile(r"(?P<job>.+)\.rank(?P<rank>\d+)\.log$")
_LOCAL = re.compile(r"(?P<job>.+)_(?P<rank>\d+)_log\.out$")


def rank_logs(run: Facts) -> dict[int, Path]:
    """The newest job's log of every rank, by rank; a restarted job has appended to its own."""
    jobs: dict[str, dict[int, Path]] = {}
    for path in sorted((run.path / "logs").glob("*")):
        if match := _SLURM.match(path.name) or _LOCAL.match(path.name):
            jobs.setdefault(match["job"], {})[int(match["rank"])] = path
    if run.job_id in jobs:
        return jobs[run.job_id]
    # The job has not begun to print, or it ran here: whatever was written last.
    return max(jobs.values(), key=lambda logs: max(map(_mtime, logs.values())), default={})


def batch_log(run: Facts) -> Path | None:
    """What the batch script of the run's job printed itself, srun's and Slurm's words included."""
    if not run.submission:
        return None
    folder = Path(run.submission["script"]).parent / "batch"
    path = folder / f"{run.job_id}.log"
    return path if path.exists() else None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
