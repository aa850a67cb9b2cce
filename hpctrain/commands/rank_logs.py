"""The logs of a run, and the one that tells most about a failure.

    Slurm             RUN/logs/123_4.rank0.log, and array-N/batch/123_4.log of its sweep, or
                      RUN/logs/123_4.batch.log if several runs share the job
    submitit's local  RUN/logs/JOB_0_log.out
    in a terminal     RUN/logs/terminal_N.rank0.log, for the Nth attempt there

A job that Slurm restarts appends to its files.

When a rank dies, the other ranks fail too, because a connection is broken; their errors are not the
cause. A rank records its own error (`failure`), and the observers name one that does not get on.
"""

import re
from pathlib import Path

from hpctrain.commands.facts import Facts
from hpctrain.runs.state.failure import Failure

_RANK_LOG = re.compile(r"(?P<job>.+)\.rank(?P<rank>\d+)\.log$")
_LOCAL_LOG = re.compile(r"(?P<job>.+)_(?P<rank>\d+)_log\.out$")


def telling(run: Facts) -> int | None:
    """Return the rank whose log tells why a run has failed; None if no rank has written one.

    It is the one that has recorded its error, or was named by the observers, or else the one that
    stopped writing first.
    """
    logs = rank_logs(run)
    error, now = Failure.get(run.path), run.attempt
    is_new = error is not None and error.key == now.key and error.time >= now.started
    named = error.rank if error and is_new else run.hang.rank if run.hang else None
    if named in logs:
        return named
    # A log that the last attempt has not written to has only errors of older attempts.
    written = {rank: _mtime(path) for rank, path in logs.items() if path.stat().st_size}
    began = now.started - 1.0 if run.recorded_state != "queued" else 0.0
    return min(((at, rank) for rank, at in written.items() if at >= began), default=(0, None))[1]


def rank_logs(run: Facts) -> dict[int, Path]:
    """Return the log of each rank of the newest job, by rank."""
    jobs: dict[str, dict[int, Path]] = {}
    for path in sorted((run.path / "logs").glob("*"), key=_mtime):
        # A FIFO in place of a log would be waited for.
        if (match := _RANK_LOG.match(path.name) or _LOCAL_LOG.match(path.name)) and path.is_file():
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
