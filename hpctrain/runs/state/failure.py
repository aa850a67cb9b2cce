"""The failure of a rank: the file `failed` in a run directory says why a rank has failed.

    a rank raises an exception of its own ── recorded ── DIR/failed
    rank 0 sees a broken connection       ── read ────── the cause, for run.json and MLflow
    srun has ended with an error          ── read ────── a failure, or else a rank was killed

A rank that is killed with SIGKILL writes nothing. The other ranks then fail too, because a
connection is broken. Such errors are not recorded, as they do not name the cause. The exit code of
srun cannot replace the file: when one rank has failed, Slurm ends the others with signals, and srun
returns the highest code.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hpctrain import record
from hpctrain.disk import write_atomically
from hpctrain.errors import DamageError, HealthError
from hpctrain.secrets import mask

# A collective that has timed out is no such error: then a rank hangs, and none has died
# (`hpctrain.faults.late_ranks`).
_OF_ANOTHER_RANK = re.compile(
    r"Connection (was likely )?(closed|reset|refused)|Broken ?pipe"
    r"|(remote|peer).* (closed|exited|disconnected)"
    r"|gloo/transport(?!.*Timed out)|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
    r"|ChildFailedError|KeyboardInterrupt|SystemExit|DistNetworkError"
    r"|rank \d+ (is gone|has given no sign of life|failed: )",
    re.IGNORECASE,
)

_TOGETHER_S = 1.0  # a launcher starts its ranks together; none fails that early
_LATE_RANK = re.compile(r"^LateRankError: |gloo/transport.*Timed out")


class _Failure(record.Record, frozen=True):
    error: str
    time: record.Time
    job_id: record.JobId
    restart_count: record.Count


def is_of_another_rank(error: str) -> bool:
    """Return whether an error only says that another rank has died."""
    return _OF_ANOTHER_RANK.search(error) is not None


def described(error: BaseException) -> str:
    """Return the text of an error that records keep, without secrets.

    The name of its class comes first, except where the text says everything about a run's health.
    """
    name = "" if isinstance(error, HealthError) else f"{type(error).__name__}: "
    return mask(f"{name}{error}".replace("\0", "\\0"))  # no record has NUL in a text


def is_of_late_rank(error: str) -> bool:
    """Return whether an error says that a rank did not come to a collective operation.

    It is a fault of a node or of the network, like a rank that was killed, and not an error of the
    program. Another attempt may succeed.
    """
    return _LATE_RANK.search(error) is not None


def is_of_other_holder(error: str) -> bool:
    """Return whether an error says that another process trains the run, which records its end."""
    return error.startswith("InUseError: ")


def one_line(error: str) -> str:
    """Return the text of an error in one line, without the code lines of a user's constructor."""
    return " ".join(error.partition('\n  File "')[0].split())


def path(run: Path) -> Path:
    """Return the file with the error of the first rank that failed."""
    return run / "failed"


@contextmanager
def recorded(run: Path, job_id: str, restart_count: int) -> Iterator[None]:
    """Record an exception of the context, unless it follows from the death of another rank.

    The job id is "" outside Slurm, which has restarted the job `restart_count` times.
    """
    try:
        yield
    except BaseException as error:
        text = described(error)
        asked = isinstance(error, KeyboardInterrupt | SystemExit)
        follows = not asked and is_of_another_rank(text)
        if run.is_dir() and not follows and read(run, job_id, restart_count) is None:
            content = {
                "error": text,
                "time": time.time(),
                "host": socket.gethostname(),
                "job_id": job_id,
                "restart_count": restart_count,
            }
            with suppress(OSError):
                write_atomically(path(run), json.dumps(content) + "\n", sync=False)
        raise


def read(run: Path, job_id: str, restart_count: int) -> str | None:
    """Return the error that a rank has recorded since this start of the job; None without one.

    Without a job id, the file may be of an earlier start, if it is older than this process.
    """
    try:
        found = record.read(_Failure, path(run))
    except (FileNotFoundError, DamageError):
        return None
    if not job_id and found.time < psutil.Process().create_time() - _TOGETHER_S:
        return None
    mine = (found.job_id, found.restart_count) == (job_id, restart_count)
    return found.error if mine else None
