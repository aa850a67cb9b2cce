"""All sensors of a node in one reading, under the names that MLflow gives them.

MLflow shows the metrics `system/NODE/NAME` on the page "System metrics" of a run.
"""

import logging
import time
from collections.abc import Callable

import psutil

from hpctrain.insight.monitor.cgroup import JobCgroup
from hpctrain.insight.monitor.gpus import Gpus

log = logging.getLogger(__name__)
_MB = 1e6


class _Rates:
    """How fast counters rise; it keeps the last reading of each, by name."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def of(self, name: str, total: float) -> float | None:
        """Return how fast a counter has risen per second; None at its first reading or a reset."""
        now = time.monotonic()
        before = self._before.get(name)
        self._before[name] = (now, total)
        if before is None or now <= before[0] or total < before[1]:
            return None
        return (total - before[1]) / (now - before[0])


class Sensors:
    """The sensors of this node, for the job."""

    def __init__(self, job: JobCgroup, gpus: Gpus) -> None:
        self._job, self._gpus = job, gpus
        self._rates = _Rates()
        self._silent: set[str] = set()
        self.read()  # rates need a reading before

    def read(self) -> dict[str, float]:
        """Return the value of every sensor that answers, by name.

        `cpu_…` and `system_memory_…` are those of the job, against its limits. `node_disk_…` and
        `node_network_…` are those of the whole node, as Linux does not count them for a job.
        """
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "the job": self._of_job,
            "the disks": self._disks,
            "the network": self._network,
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
        use = self._job.use()
        found: dict[str, float] = {}
        if use.cpu_s is not None and (rate := self._rates.of("cpu", use.cpu_s)) is not None:
            found["cpu_utilization_percentage"] = 100 * rate / use.cores
        if use.memory is not None:
            found["system_memory_usage_megabytes"] = use.memory / _MB
            found["system_memory_usage_percentage"] = 100 * use.memory / use.memory_limit
        return found

    def _disks(self) -> dict[str, float]:
        counters = psutil.disk_io_counters()
        if counters is None:
            return {}
        totals = {"read": counters.read_bytes, "write": counters.write_bytes}
        return self._speeds("node_disk", totals)

    def _network(self) -> dict[str, float]:
        """Return the rates of all interfaces but the loopback."""
        every = psutil.net_io_counters(pernic=True).items()
        used = [counters for name, counters in every if name != "lo"]
        totals = {
            "receive": sum(each.bytes_recv for each in used),
            "transmit": sum(each.bytes_sent for each in used),
        }
        return self._speeds("node_network", totals)

    def _speeds(self, what: str, totals: dict[str, int]) -> dict[str, float]:
        rates = {name: self._rates.of(f"{what}_{name}", t) for name, t in totals.items()}
        return {
            f"{what}_{name}_megabytes_per_second": rate / _MB
            for name, rate in rates.items()
            if rate is not None
        }
