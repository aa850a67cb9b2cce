"""What Slurm says about jobs of submitit's kind; theirs ask `sacct` for each job."""

import logging
import time

from submitit.core.core import InfoWatcher
from submitit.slurm.slurm import read_job_id

from hpctrain.slurm import queue

log = logging.getLogger(__name__)
_POLL_S = 30  # the longest time between two calls of `squeue`; submitit begins with 2 s


class QueueWatcher(InfoWatcher):  # type: ignore[misc]
    """Looks up the jobs of this process with one `squeue`, and one `sacct` for those that ended.

    It decides when to ask as submitit does: often at first, then less and less often.
    """

    def __init__(self) -> None:
        super().__init__(delay_s=_POLL_S)
        self.users: set[str] = set()
        self._gone: set[str] = set()  # have left the queue

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
