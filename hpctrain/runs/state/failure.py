"""The failure of a rank: the file `failed` in a run directory says why a rank has failed.

    a rank raises an exception of its own ── recorded ── DIR/failed
    rank 0 sees a broken connection       ── read ────── the cause, for run.json and MLflow
    srun has ended with an error          ── read ────── a failure, or else a rank was killed

A rank that is killed with SIGKILL writes nothing; `hang.json` names it. The other ranks fail too,
because a connection is broken. Such errors are not recorded, as they do not name the cause. The
exit code of srun cannot replace the file: when one rank has failed, Slurm ends the others with
signals, and srun returns the highest code.
"""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hpctrain.base.errors import HealthError, JoinError
from hpctrain.base.files.mailbox import Message
from hpctrain.base.files.record import Count, Time
from hpctrain.base.names.run_record import AttemptKey, Hang, Keyed
from hpctrain.base.processes import frames
from hpctrain.base.processes.causes import (
    ANOTHER_RANK,
    CODE,
    GPU_FAULT,
    LOST_MOUNT,
    cause_of,
    one_line,
)
from hpctrain.base.secrets import mask
from hpctrain.cluster.ranks import epochs

log = logging.getLogger(__name__)
_NAMED_S = 2.0  # until the observers have seen a death
_TOGETHER_S = 1.0  # a launcher starts its ranks together; none fails that early


class Failure(Keyed, Message, frozen=True, kw_only=True):
    """The error of the first rank that failed, its cause, its host, the user's line, the rank."""

    BOX = "failed"

    error: str
    time: Time
    cause: str = ""
    host: str = ""
    frame: str = ""
    rank: Count | None = None


def described(error: BaseException) -> str:
    """Return the text of an error that records keep, without secrets.

    The name of its class comes first, except where the text says everything about a run's health.
    """
    name = "" if isinstance(error, HealthError) else f"{type(error).__name__}: "
    return mask(f"{name}{error}".replace("\0", "\\0"))  # no record has NUL in a text


@contextmanager
def recorded(run: Path, key: AttemptKey, rank: int = 0) -> Iterator[None]:
    """Record an exception of the context, unless it follows from the death of another rank.

    The job id of the key is "" outside Slurm.
    """
    try:
        yield
    except BaseException as error:
        epochs.end_if_over(run, key)
        _record(run, key, error, rank)
        raise


def _record(run: Path, key: AttemptKey, error: BaseException, rank: int) -> None:
    text = described(error)
    asked = isinstance(error, KeyboardInterrupt | SystemExit)
    cause, host = CODE if asked else cause_of(error), socket.gethostname()
    if cause in (GPU_FAULT, LOST_MOUNT):
        text = f"{cause} on {host}: {one_line(text)}"
    follows = cause is ANOTHER_RANK
    if follows and run.is_dir() and (said := _wait_for_cause(run, key)):
        log.error("the error of this rank follows from this: %s", said)
    elif follows and isinstance(error, JoinError):  # nobody has left a group that never was
        cause, follows = CODE, False
    if run.is_dir() and not follows and first(run, key) is None:
        at = frames.place(frames.of_error(error))
        failure = Failure(
            *key, error=text, time=time.time(), cause=cause.name, host=host, frame=at, rank=rank
        )
        with suppress(OSError):
            failure.put(run)


def cause(run: Path, key: AttemptKey) -> str | None:
    """Return the error that `first` does, or else which rank was found dead, or not to get on."""
    error, hang = first(run, key), Hang.of(run, key, _begun(key))
    return error.error if error else hang.sentence if hang else None


def _wait_for_cause(run: Path, key: AttemptKey) -> str | None:
    """Return the cause of an error that follows from another rank's, which may come a bit later."""
    end = time.monotonic() + _NAMED_S
    while (found := cause(run, key)) is None and time.monotonic() < end:
        time.sleep(0.1)
    return found


def first(run: Path, key: AttemptKey) -> Failure | None:
    """Return the error that a rank has recorded since this start of the job; None without one.

    Without a job id, the file may be of an earlier start, if it is older than this process.
    """
    found = Failure.get(run)
    return found if found and found.key == key and found.time >= _begun(key) else None


def _begun(key: AttemptKey) -> float:
    """Return when these ranks have begun at the earliest; 0 if the key tells them from others."""
    return 0.0 if key.job_id else psutil.Process().create_time() - _TOGETHER_S
