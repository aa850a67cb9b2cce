"""A stop request: the file `stop` in a run directory asks the run to stop for good.

    cancel writes {"by": …, "time": …} ── rank 0 reads it, saves and stops; the job is not requeued
    a user submits or starts the run again ── the request is over, and the file is deleted

A signal would not be enough. It cannot say whether the job shall be requeued, it reaches only jobs
of the same cluster and processes of the same host, and it is lost if Slurm requeues the job at the
same moment. The file stays when Slurm restarts the job; only a new start by a user ends it.
"""

import time
from contextlib import suppress
from pathlib import Path

from hpctrain.base.files.mailbox import Message
from hpctrain.base.files.record import Time
from hpctrain.base.processes.causes import IDLE as IDLE_DEVICES
from hpctrain.base.processes.causes import USER_STOP, Cause


class StopRequest(Message, frozen=True):
    """Who has asked a run to stop, and when, in seconds since the epoch."""

    BOX = "stop"

    by: str
    time: Time

    @property
    def cause(self) -> Cause:
        """Why the run shall stop."""
        return IDLE_DEVICES if self.by.startswith(IDLE) else USER_STOP


IDLE = "the monitor"
"""Who asks if the devices are idle and `monitor.idle_action` is stop, as the user has wished."""


def write(run: Path, by: str) -> None:
    """Ask a run, in the name of a user, to save and to stop for good."""
    StopRequest(by=by, time=time.time()).put(run)


def read(run: Path, since: float = 0.0) -> StopRequest | None:
    """Return the stop request of a run, or None. An empty file, made by hand, is valid too.

    Requests before the last submission, at `since` in seconds since the epoch, are over.
    """
    request = StopRequest.get(run)
    if request is None:
        with suppress(OSError):
            request = StopRequest(by="a file", time=StopRequest.path(run).lstat().st_mtime)
    return request if request and request.time >= since else None
