"""Jobs on Slurm and on this machine, with the logs of their ranks: those of runs and functions."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit import LocalJob, SlurmJob
from submitit.core.utils import JobPaths

from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.launch.queue_watcher import QueueWatcher
from hpctrain.slurm import queue

log = logging.getLogger(__name__)


class _RunPaths(JobPaths):  # type: ignore[misc]
    """The files of a run, under submitit's names. There are no pickles.

    Without a job its id is ""; a local job has no batch script.
    """

    def __init__(self, logs: Path, job_id: str, script: Path | None = None) -> None:
        super().__init__(logs, job_id)
        self._logs, self._script = logs, script

    @property
    def folder(self) -> Path:
        """The folder with the logs."""
        return self._logs

    @property
    def submission_file(self) -> Path:
        """The batch script."""
        return self._script or Path(super().submission_file)

    @property
    def stdout(self) -> Path:
        """The log of rank 0, which has both of its output streams."""
        return self.ranks()[0]

    @property
    def stderr(self) -> Path:
        """The same file as `stdout`."""
        return self.stdout

    def text(self) -> str | None:
        """Return the logs of all ranks, one after the other; None if there are none."""
        logs = [path.read_text(errors="replace") for path in self.ranks() if path.exists()]
        return "\n".join(logs) if logs else None

    def ranks(self) -> list[Path]:
        """Return the logs of all ranks, in their order; that of rank 0 may not exist yet."""
        local = self._script is None
        names = f"{self.job_id}_*_log.out" if local else f"{self.job_id}.rank*.log"
        found = sorted(self._logs.glob(names), key=lambda path: (len(path.name), path.name))
        return found or [self._logs / names.replace("*", "0")]


class LoggedJob:
    """What the jobs of runs and functions have in common, on Slurm and on this machine."""

    _paths: _RunPaths

    def results(self) -> list[Any]:
        """Wait for the end of the job and return its results."""
        raise NotImplementedError

    def result(self) -> Any:
        """Wait for the end of the job and return its first result."""
        return self.results()[0]

    def exception(self) -> HpctrainError | None:
        """Wait for the end of the job and return the error that `result` would raise, or None."""
        try:
            self.result()
        except HpctrainError as error:
            return error
        return None

    def stdout(self) -> str | None:
        """Return the logs of all ranks, one after the other; None if there are none."""
        return self._paths.text()

    def stderr(self) -> str | None:
        """Return the same as `stdout`: each rank writes both streams into one file."""
        return self.stdout()

    def _ended(self) -> str:
        """Return how the job has ended, in Slurm's words; "" if nothing was recorded."""
        raise NotImplementedError


class SlurmLoggedJob(LoggedJob, SlurmJob):  # type: ignore[misc]
    """A job of Slurm, with its logs and its batch script; or a chain, which ends with its last."""

    watcher = QueueWatcher()

    def __init__(
        self, logs: Path, job_id: str, script: Path | None, behind: Sequence[str] = ()
    ) -> None:
        self._chain = [job_id, *behind]
        super().__init__(folder=logs, job_id=self._chain[-1])
        self._paths = _RunPaths(logs, job_id, script)

    @property
    def state(self) -> str:
        """Slurm's word, such as PENDING or RUNNING; UNKNOWN if neither it nor a record tells."""
        return self.watcher.get_state(self._job_id) or self._ended() or "UNKNOWN"

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has finished or left the queue for good.

        With `force_check` the scheduler is asked even if its last answer is young.
        """
        mode = "force" if force_check else "standard"
        finished = self._ended() == "COMPLETED"
        return finished or bool(self.watcher.is_done(self._job_id, mode=mode))

    def cancel(self, check: bool = True) -> None:
        """Cancel the job; if Slurm refuses, and `check` is true, it raises a LaunchError."""
        try:
            queue.cancel(self._chain)
        except LaunchError as error:
            if check:
                raise
            log.warning("%s", error)

    def _interrupt(self, timeout: bool = False) -> None:
        """Send the signal of a time limit, or that of a preemption, for tests."""
        queue.cancel(self._chain[:1], f"--signal={'USR2' if timeout else 'TERM'}")


class LocalLoggedJob(LoggedJob, LocalJob):  # type: ignore[misc]
    """A job on this machine, under submitit's controller process, whose id is that of the job."""

    def __init__(self, logs: Path, job_id: str, process: Any) -> None:
        super().__init__(folder=logs, job_id=job_id, process=process)
        self._paths = _RunPaths(logs, job_id)

    def _register_in_watcher(self) -> None:
        """Do nothing: there is no scheduler."""

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state of the job under the key `jobState`."""
        runs = self._process is not None and self._process.poll() is None
        return {"jobState": "RUNNING" if runs else self._ended() or "FAILED"}

    def cancel(self, check: bool = True) -> None:
        """End the ranks: the controller passes SIGTERM on to them, with which a run saves."""
        if not self.done():
            self._process.terminate()
