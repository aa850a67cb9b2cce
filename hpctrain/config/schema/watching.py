"""The keys of `monitor`, `hang` and `tracking`: what watches a run and reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass
class HangConfig:
    """One process per node watches whether the ranks get on, and names one that does not."""

    floor_s: float | None = key(
        30.0,
        "A rank hangs if it does not get on for this time, and for 10 times as long as usual: in a "
        "step, a batch of an evaluation, a checkpoint. Null watches nothing.",
        unit="seconds",
        at_least=1,
    )


@dataclass
class TrackingConfig:
    """Metrics go to a journal in the run directory, and from there to MLflow."""

    enabled: bool = key(True, "Metrics are tracked.")
    uri: str | None = key(
        None,
        "MLflow stores the runs here. Null means the variable MLFLOW_TRACKING_URI when the run is "
        "asked for, and without it sqlite:///OUTPUT_DIR/mlflow.db.",
    )
    experiment: str = key("hpctrain", "MLflow lists the runs under this experiment.")
    upload: bool = key(
        True,
        "The journal is uploaded while the run is training. With false, `python -m hpctrain "
        "status --upload` uploads it later.",
    )
    drain_s: float = key(
        10.0,
        "After the training, the job waits at most so long until everything is uploaded. The start "
        "of MLflow does not count, for at most 60 s; 0 waits for nothing. "
        "`python -m hpctrain status --upload` uploads the rest later.",
        unit="seconds",
        at_least=0.0,
    )
    also: list[dict[str, Any]] = key(
        [],
        "These trackers get the metrics, too, beside MLflow: each is a "
        "hpctrain.trackers.OtherTracker, named by `_target_`, such as "
        "hpctrain.trackers.TensorBoard.",
    )
