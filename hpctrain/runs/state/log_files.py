"""Find the output of a run: the logs of its ranks and of its batch script.

    Slurm             RUN/logs/123_4.rank0.log, and array-N/batch/123_4.log of its sweep, or
                      RUN/logs/123_4.batch.log if several runs share the job
    submitit's local  RUN/logs/JOB_0_log.out
    in a terminal     RUN/logs/terminal_N.rank0.log, for the Nth attempt there

A job that Slurm restarts appends to its files.
"""

import re
from pathlib import Path

from hpctrain.runs.state.facts import Facts

_SLURM = re.compile(r"(?P<job>.+)\.rank(?P<rank>\d+)\.log$")
_LOCAL = re.compile(r"(?P<job>.+)_(?P<rank>\d+)_log\.out$")


def rank_logs(run: Facts) -> dict[int, Path]:
    """Return the log of each rank of the newest job, by rank."""
    jobs: dict[str, dict[int, Path]] = {}
    for path in sorted((run.path / "logs").glob("*"), key=_mtime):
        # A FIFO in place of a log would be waited for.
        if (match := _SLURM.match(path.name) or _LOCAL.match(path.name)) and path.is_file():
            # Each rank counts its own attempts in a terminal, so the numbers may differ.
            job = "terminal" if match["job"].startswith("terminal_") else match["job"]
            jobs.setdefault(job, {})[int(match["rank"])] = path
    if run.job_id in jobs:
        return jobs[run.job_id]
    # The job has printed nothing yet, or the run has no job: take the logs written last.
    return max(jobs.values(), key=lambda logs: max(map(_mtime, logs.values())), default={})


def batch_log(run: Facts) -> Path | None:
    """Return the log of the batch script, which also has the messages of srun and Slurm."""
    if not run.submission:
        return None
    folder = Path(run.submission.script).parent / "batch"
    own = run.path / "logs" / f"{run.job_id}.batch.log"
    return next((path for path in (own, folder / f"{run.job_id}.log") if path.is_file()), None)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
