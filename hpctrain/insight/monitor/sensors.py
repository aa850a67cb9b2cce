"""All sensors of a node in one reading, under the names that MLflow gives them.

MLflow shows the metrics `system/NODE/NAME` on the page "System metrics" of a run. Of GPUs only the
job's own are read.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpctrain.insight.monitor.cgroup import JobCgroup
from hpctrain.insight.monitor.nvidia import Nvidia

log = logging.getLogger(__name__)
_MB = 1e6


class _Sensor(NamedTuple):
    """A row: a reading, the metrics of its values, and how those of a counter are told."""

    reading: str
    metrics: Callable[..., dict[str, float | None]]  # None is no value
    counter: bool = False  # its values are told since the first


def _named(*names: str) -> Callable[..., dict[str, float | None]]:
    return lambda *values: dict(zip(names, values, strict=False))


_SENSORS = {
    "memory": _Sensor(
        "memory",
        lambda used, size: {
            "memory_usage_megabytes": used / _MB,
            "memory_usage_percentage": 100 * used / size,
        },
    ),
    "use": _Sensor("use", _named("utilization_percentage")),
    "power": _Sensor(
        "power",
        lambda watts, limit: {
            "power_usage_watts": watts,
            "power_usage_percentage": 100 * watts / limit if limit else None,
        },
    ),
    "energy": _Sensor("energy", _named("energy_joules"), counter=True),
    "temperature": _Sensor("heat", _named("temperature_celsius")),
    "clock": _Sensor("clock", _named("clock_megahertz")),
    "throttling": _Sensor("throttled", _named("throttled_by_heat", "throttled_by_power")),
    "ECC": _Sensor("ecc", _named("ecc_corrected_errors", "ecc_uncorrected_errors")),
}
_OF_A_PART = ("memory",)  # what a MIG instance has of its own


class Gpus:
    """The GPUs of the job on this node, whole ones or MIG instances, in the order of their numbers.

    `facts` are the name of each GPU, and the version of the driver.
    """

    def __init__(self, uuids: Sequence[str], library: Nvidia | None = None) -> None:
        self.facts: dict[str, str] = {}
        self._gpus: dict[int, Any] = {}
        self._sensors: dict[int, dict[str, _Sensor]] = {}  # that each GPU has
        self._first: dict[str, float] = {}  # readings of counters
        if not uuids:
            return
        self._library = library or Nvidia()
        try:
            self._library.open()
        except self._library.errors as error:
            log.warning("GPUs are not measured: %s", error)
            return
        self._find(uuids)

    def _find(self, uuids: Sequence[str]) -> None:
        library = self._library
        for number, uuid in enumerate(uuids):
            try:
                gpu = library.find(uuid)
                driver, model = (library.readings[name](gpu) for name in ("driver", "model"))
                is_part = library.is_part(gpu)
            except library.errors as error:
                log.warning("GPU %d (%s) is not measured: %s", number, uuid, error)
                continue
            self.facts |= {"driver": driver, f"gpu_{number}": model}
            self._gpus[number] = gpu
            self._sensors[number] = {
                name: sensor
                for name, sensor in _SENSORS.items()
                if name in _OF_A_PART or not is_part
            }

    def read(self) -> dict[str, float]:
        """Return the value of every sensor that answers, such as `gpu_0_power_usage_watts`.

        A sensor that fails costs its own value alone. One that the GPU has not is asked once.
        """
        found: dict[str, float] = {}
        for number, gpu in self._gpus.items():
            for name, sensor in [*self._sensors[number].items()]:
                try:
                    values = sensor.metrics(*self._library.read(sensor.reading, gpu))
                except self._library.errors as error:
                    if self._library.lacks(error):
                        del self._sensors[number][name]
                    log.warning("gpu_%d has no %s: %s", number, name, error)
                    continue
                for key, value in values.items():
                    metric = f"gpu_{number}_{key}"
                    told = self._told(metric, value, sensor.counter)
                    if told is not None:
                        found[metric] = float(told)
        return found

    def _told(self, metric: str, value: float | None, counter: bool) -> float | None:
        if value is None or not counter:
            return value
        if value < self._first.setdefault(metric, value):  # the driver was loaded anew
            self._first[metric] = value
        return value - self._first[metric]


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
