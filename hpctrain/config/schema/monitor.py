"""The keys of `monitor`."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.schema.key import key


@dataclass
class MonitorConfig:
    """One process per node reads the sensors of the job's GPUs, cores and memory."""

    enabled: bool = key(True, "Sensors are read, for the run directory and for MLflow.")
    every_s: float = key(10.0, "The sensors are read this often.", unit="seconds", at_least=0.1)
    idle_minutes: float = key(
        30.0,
        "A warning names a GPU of the job that was used below 5 % in every sample of this time. "
        "Without GPUs the cores of the job are watched. The time before the second step of an "
        "attempt does not count.",
        unit="minutes",
        above=0,
    )
    idle_action: str = key(
        "warn",
        "What happens when a device is idle: a line in the log and the tag hpctrain.idle in MLflow "
        "(warn), or the run also saves and ends (stop).",
        choices=("warn", "stop"),
    )
