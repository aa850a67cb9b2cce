"""Jobs on Slurm and on this machine, with the logs of their ranks: those of runs and functions.

submitit's own jobs ask `sacct` for each job; these ask `squeue` for all of them.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

from submitit import LocalJob, SlurmJob
from submitit.core.core import InfoWatcher, Job
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import read_job_id

from hpctrain.base.errors import HpctrainError, LaunchError
from hpctrain.cluster.slurm import queue
from hpctrain.cluster.slurm.patience import WATCH_S

log = logging.getLogger(__name__)
_FIRST_S = 15.0  # between the first calls of `squeue`; submitit begins with 2 s


class _RunPaths(JobPaths):  # type: ignore[misc]
    """The files of a run, under submitit's names; without a job its id is ""."""

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


class LoggedJob(Job):  # type: ignore[misc]
    """What the jobs of runs and functions have in common, on Slurm and on this machine."""

    _paths: _RunPaths

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


class _QueueWatcher(InfoWatcher):  # type: ignore[misc]
    """Looks up the jobs of this process with one `squeue`, and one `sacct` for those that ended.

    It decides when to ask as submitit does: more often at first, then less and less often.
    """

    def __init__(self) -> None:
        super().__init__(delay_s=WATCH_S)
        self.users: set[str] = set()
        self._gone: set[str] = set()  # have left the queue

    def update_if_long_enough(self, mode: str) -> None:
        """Ask the scheduler if the last answer is old, or with the mode "force"."""
        if mode != "standard" or time.time() - self._last_status_check >= _FIRST_S:
            super().update_if_long_enough(mode)

    def update(self) -> None:
        """Ask the scheduler. If it does not answer, the last answer stays."""
        self._last_status_check = time.time()
        waiting = self._registered - self._finished
        if not waiting:
            return
        self._num_calls += 1
        try:
            jobs = {job.id: job for job in queue.queued({queue.me(), *self.users}).values()}
        except queue.UnreachableError as error:
            log.warning("%s; asking again later", error)
            return
        for job_id in waiting & jobs.keys():
            job = jobs[job_id]
            self._info_dict[job_id] = {
                "JobID": job_id,
                "State": job.state,
                "Reason": job.reason,
                "NodeList": job.nodes,
            }
        self._gone = (self._gone | waiting) - jobs.keys()
        if gone := waiting - jobs.keys():
            ended = queue.ended({job_id.partition("_")[0] for job_id in gone}) or {}
            found = {task: end for job_id, end in ended.items() for task in _tasks(job_id)}
            for job_id in gone:
                # An array that was cancelled before any task started is there as a whole.
                array = ended.get(job_id.partition("_")[0], queue.Ended("", "", "", ""))
                end = found.get(job_id, array)
                # The accounting may be late or not answer: ask again for the state of the job.
                if end.state not in ("", "PENDING", "RUNNING", "REQUEUED"):
                    self._finished.add(job_id)
                self._info_dict[job_id] = {
                    "JobID": job_id,
                    "State": end.state.partition(" ")[0],
                    "Reason": end.reason,
                    "NodeList": end.nodes,
                    "ExitCode": end.exit_code,
                }

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return Slurm's word for the state; "" if it is unknown."""
        return str(self.get_info(job_id, mode=mode).get("State", ""))

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether the job has left the queue; a requeued job has not."""
        self.get_info(job_id, mode=mode)
        return job_id in self._gone


def _tasks(job_id: str) -> list[str]:
    """Return the tasks that `sacct` shows in one line, as `12_[0-3]` if none has started."""
    try:
        parts = read_job_id(job_id)
    except ValueError:
        return [job_id]
    return [
        f"{array}_{task}"
        for array, first, *last in (part for part in parts if len(part) > 1)
        for task in range(int(first), int(last[0] if last else first) + 1)
    ]


class SlurmLoggedJob(LoggedJob, SlurmJob):  # type: ignore[misc]
    """A job of Slurm, with its logs and its batch script; or a chain, which ends with its last."""

    watcher = _QueueWatcher()

    def __init__(self, logs: Path, ids: Sequence[str], script: Path | None) -> None:
        self.ids = ids
        super().__init__(folder=logs, job_id=ids[-1])
        self._paths = _RunPaths(logs, ids[0], script)

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
            queue.cancel(self.ids)
        except LaunchError as error:
            if check:
                raise
            log.warning("%s", error)


class LocalLoggedJob(LoggedJob, LocalJob):  # type: ignore[misc]
    """A job on this machine, under submitit's controller process, whose id is that of the job."""

    def __init__(self, logs: Path, process: Popen[bytes]) -> None:
        super().__init__(folder=logs, job_id=str(process.pid), process=process)
        self._paths = _RunPaths(logs, self._job_id)

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """Return the state of the job under the key `jobState`."""
        runs = self._process is not None and self._process.poll() is None
        return {"jobState": "RUNNING" if runs else self._ended() or "FAILED"}

    def wait(self) -> None:
        """Wait for the end of the job, without the second between two looks of submitit's."""
        if self._process is not None:
            self._process.wait()

    def cancel(self, check: bool = True) -> None:
        """End the ranks: the controller passes SIGTERM on to them, with which a run saves."""
        if not self.done():
            self._process.terminate()
