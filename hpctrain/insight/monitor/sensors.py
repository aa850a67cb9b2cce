"""All sensors of a node in one reading, under the names that MLflow gives them.

MLflow shows the metrics `system/NODE/NAME` on the page "System metrics" of a run.
"""

import logging
import time
from collections.abc import Callable

from hpctrain.insight.monitor.cgroup import JobCgroup
from hpctrain.insight.monitor.gpus import Gpus

log = logging.getLogger(__name__)
_MB = 1e6


class Sensors:
    """The sensors of this node, for the job."""

    def __init__(self, job: JobCgroup, gpus: Gpus) -> None:
        self._job, self._gpus = job, gpus
        self._cpu: tuple[float, float] | None = None  # when it was read last, and the CPU time
        self._silent: set[str] = set()
        self.read()  # a rate needs a reading before

    def read(self) -> dict[str, float]:
        """Return the value of every sensor that answers, by name.

        All are those of the job, against its limits: what other jobs do on the node does not count.
        """
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "the job": self._of_job,
            "the GPUs": self._gpus.read,
        }
        found: dict[str, float] = {}
        for what, read in parts.items():
            try:
                found |= read()
            except Exception as error:
                # A library of sensors may fail in any way; the other sensors must go on.
                if what not in self._silent:
                    log.warning("no sensors of %s: %s: %s", what, type(error).__name__, error)
                self._silent.add(what)
        return found

    def _of_job(self) -> dict[str, float]:
        use, now, before = self._job.use(), time.monotonic(), self._cpu
        found: dict[str, float] = {}
        self._cpu = None if use.cpu_s is None else (now, use.cpu_s)
        if before and use.cpu_s is not None and now > before[0] and use.cpu_s >= before[1]:
            rate = (use.cpu_s - before[1]) / (now - before[0])
            found["cpu_utilization_percentage"] = 100 * rate / use.cores
        if use.memory is not None:
            found["system_memory_usage_megabytes"] = use.memory / _MB
            found["system_memory_usage_percentage"] = 100 * use.memory / use.memory_limit
        return found
