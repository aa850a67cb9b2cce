"""What the sensors of a run's nodes say: energy, use, memory, and GPUs that did nothing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from hpctrain.base.units import GIB
from hpctrain.tracking import samples

_GAP = 3.0  # times the usual time between two samples; a longer gap was no measurement
_TAIL = 8192  # bytes: the samples of about a minute
_JOULES = 3.6e6  # in a kWh


@dataclass
class _Sensor:
    """One value of a node over time: seconds since the epoch, and the values."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def durations(self) -> list[float]:
        """Return the seconds for which each sample stands: until the next, at most the usual."""
        steps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        if not steps:
            return [0.0] * len(self.times)
        usual = median(steps)
        return [min(max(step, 0.0), _GAP * usual) for step in steps] + [usual]


@dataclass
class Usage:
    """The samples of all nodes of a run."""

    # The sensors by name, by node.
    nodes: dict[str, dict[str, _Sensor]] = field(default_factory=dict)
    # The titles of the GPUs by node and number, such as `("n1", "gpu_0")`.
    gpus: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def read(cls, run_dir: Path, *, tail: bool = False) -> Usage:
        """Read the samples of a run, or the last of each host; damaged lines are left out."""
        usage = cls()
        for node, path in samples.files(run_dir).items():
            sensors: dict[str, _Sensor] = defaultdict(_Sensor)
            begin = max(0, path.stat().st_size - _TAIL) if tail else 0
            for sample in samples.read(path, begin):
                for name, value in sample.metrics.items():
                    sensors[name].times.append(sample.time)
                    sensors[name].values.append(value)
                for name, title in sample.facts.items():
                    if name.startswith("gpu_") and name[4:].isdecimal():
                        usage.gpus[node, name] = title
            for name in sensors:
                if found := samples.GPU.fullmatch(name):
                    usage.gpus.setdefault((node, found[1]), "")
            usage.nodes[node] = dict(sensors)
        return usage

    def times(self) -> list[float]:
        """Return the first and the last time of the samples of each node."""
        found = []
        for sensors in self.nodes.values():
            every = [time for each in sensors.values() for time in (each.times[0], each.times[-1])]
            found += [min(every), max(every)] if every else []
        return found

    def of_gpus(self, name: str) -> dict[tuple[str, str], _Sensor]:
        """Return a sensor of every GPU that has it, such as `utilization_percentage`."""
        return {
            (node, gpu): sensor
            for node, gpu in sorted(self.gpus)
            if (sensor := self.nodes[node].get(f"{gpu}_{name}"))
        }

    def kwh(self) -> float | None:
        """Return the energy that the GPUs have counted; None unless every GPU of the run does."""
        counted = self.of_gpus("energy_joules")
        if not self.gpus or counted.keys() != self.gpus.keys():
            return None
        return sum(_rises(sensor.values) for sensor in counted.values()) / _JOULES

    def idle_gpu_hours(self) -> float | None:
        """Return the hours, times GPUs, in which a GPU was idle by its sensor."""
        sensors = self.of_gpus("utilization_percentage")
        if not sensors:
            return None
        seconds = 0.0
        for each in sensors.values():
            pairs = zip(each.values, each.durations(), strict=True)
            seconds += sum(d for value, d in pairs if value < samples.IDLE_PERCENT)
        return seconds / 3600

    def idle_part(self, share: float = 0.9) -> float | None:
        """Return the part of the GPUs that were idle in such a share of their samples."""
        found = [each.values for each in self.of_gpus("utilization_percentage").values()]
        low = (sum(v < samples.IDLE_PERCENT for v in each) >= share * len(each) for each in found)
        return sum(low) / len(found) if found else None

    def idle_minutes(self) -> float | None:
        """Return how long the GPUs of a job that has used none were idle; None if it has."""
        hours = self.idle_gpu_hours() if self.idle_part() == 1 else None
        return None if hours is None else 60 * hours / len(self.gpus)

    def host_gib(self) -> float | None:
        """Return the most memory of a node that the job has used, in GiB."""
        return self.peak("system_memory_usage_megabytes", GIB / 1e6)

    def mean(self, name: str) -> float | None:
        """Return the mean of a sensor over all GPUs or nodes; None where none has it, as below."""
        values = self._values(name)
        return fmean(values) if values else None

    def peak(self, name: str, unit: float = 1.0) -> float | None:
        """Return the most of a sensor of any GPU or node, in units of the sensor's."""
        values = self._values(name)
        return max(values) / unit if values else None

    def _values(self, name: str) -> list[float]:
        of_nodes = (sensors[name] for sensors in self.nodes.values() if name in sensors)
        return [
            value for each in (*self.of_gpus(name).values(), *of_nodes) for value in each.values
        ]


def _rises(values: list[float]) -> float:
    """Return what a counter has counted; it begins at 0 again when the driver is loaded again."""
    total, before = 0.0, 0.0
    for value in values:
        total += value - before if value >= before else value
        before = value
    return total
