"""The runs of a sweep as jobs of submitit, so that code that knows submitit's jobs can use them.

    job.job_id   job.state   job.done()   job.wait()   job.cancel()   job.result()   job.stdout()

submitit's own jobs ask `sacct`, call `scancel`, and read results from pickles. These ask
`hpctrain.cluster.slurm.queue`, and read results from the run directory.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any

from submitit.core.utils import FailedJobError

from hpctrain.base.errors import LaunchError
from hpctrain.base.processes.causes import one_line
from hpctrain.cluster.slurm import queue
from hpctrain.launch.logged_jobs import LocalLoggedJob, LoggedJob, SlurmLoggedJob
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.runs.state.shared_job import has_others

log = logging.getLogger(__name__)
_LATE_S = 15.0  # a result may appear later on a network file system
# What the scheduler would say about a job that has ended, by the state of its run.
_STATES = {"finished": "COMPLETED", "failed": "FAILED", "interrupted": "CANCELLED"}


class FailedError(LaunchError, FailedJobError):  # type: ignore[misc]
    """A job has ended without its result. It is an error of submitit, too."""


class _RunJob(LoggedJob):
    """What the jobs of runs have in common."""

    run: RunDir
    _metric: str

    def results(self) -> list[float | None]:
        """Wait for the end of the run and return its metric in a list."""
        self.wait()
        return [outcome(self.run, self._metric)]

    def submission(self) -> Any:
        """Raise LaunchError: the job is files and no pickled function."""
        raise LaunchError(f"{self.run.config_file} is what the job runs; there is no pickle")

    def _ended(self) -> str:
        return _STATES.get(self.run.read().state, "")


class RunJob(_RunJob, SlurmLoggedJob):
    """A run that was submitted to Slurm, now or earlier.

    Its id is `ARRAYJOB_TASK`, or "" for a run that finished without a job, which has no script
    either. Without a `user`, that of this process has submitted it. A chain has several `ids`, and
    the last of them is its own.
    """

    def __init__(
        self,
        run: RunDir,
        metric: str,
        ids: Sequence[str],
        script: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.run, self._metric = run, metric
        if user is not None:
            self.watcher.users.add(user)
        super().__init__(run.logs, ids, script)

    def _register_in_watcher(self) -> None:
        if self._job_id:
            self.watcher.register_job(self._job_id)

    @property
    def state(self) -> str:  # noqa: D102
        ended = self._ended()
        if not self._job_id and self.run.is_locked():
            return "RUNNING"
        if ended == "COMPLETED" or not self._job_id:
            return ended or "UNKNOWN"
        return str(super().state)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return what the scheduler says: JobID, State, Reason, NodeList, and at last ExitCode."""
        if not self._job_id:
            return {"State": self.state}
        return dict(self.watcher.get_info(self._job_id, mode=mode))

    def done(self, force_check: bool = False) -> bool:
        """Return the same of the run; one without a job may be trained here by another process."""
        if self._job_id:
            return super().done(force_check)
        return self._ended() == "COMPLETED" or not self.run.is_locked()

    def results(self) -> list[float | None]:  # noqa: D102
        self.wait()
        begin = time.monotonic()
        while self._job_id and self.watcher.get_state(self._job_id, mode="cache") == "COMPLETED":
            if self._ended() or time.monotonic() - begin > _LATE_S:
                break
            time.sleep(1)
        return super().results()

    def cancel(self, check: bool = True) -> None:
        """Stop the run for good, as `hpctrain cancel` does: it is not requeued.

        If Slurm refuses, and `check` is true, it raises a LaunchError.
        """
        if not self.done():
            stop_request.write(self.run.path, queue.me())
            if not has_others(self.run.read(), {os.path.realpath(self.run.path)}):
                super().cancel(check)


class LocalRunJob(_RunJob, LocalLoggedJob):
    """A run on this machine."""

    def __init__(self, run: RunDir, metric: str, process: Popen[bytes]) -> None:
        self.run, self._metric = run, metric
        super().__init__(run.logs, process)


def outcome(run: RunDir, metric: str) -> float | None:
    """Return the metric of a run that has ended.

    It is a LaunchError if it has not finished, and was not stopped by monitor.idle_action=stop.
    """
    record = run.read()
    state = record.state or "lost"
    request = stop_request.read(run.path)
    by = request.by if request else ""
    if state == "interrupted" and by.startswith(stop_request.IDLE):
        log.warning("%s: stopped by %s", run.name, by)
    elif state != "finished":
        reason = one_line(record.attempt.error)
        raise FailedError(
            f"{run.name} is {state}, not finished: see {run.logs}{reason and f' ({reason})'}"
        )
    value = (record.result or {}).get(metric)
    return None if value is None else float(value)
