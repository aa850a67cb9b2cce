"""The keys of `checkpoint`, `monitor`, `hang` and `tracking`: what is kept of a run and told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key


@dataclass
class CheckpointConfig:
    """Checkpoints: a run resumes from the newest that is not damaged."""

    init_from: str | None = key(
        None,
        "The first attempt of the run starts from these weights: a run, one of its checkpoints, a "
        ".safetensors file, or a folder of Hugging Face. A run that has a checkpoint of its own "
        "resumes from that. Null starts from the initial values of the model.",
        identity=False,
    )
    init_digest: str | None = key(
        None,
        "The digest of the weights in init_from; it is part of the run's name, and no other "
        "weights are loaded. Null is filled in when the run is asked for.",
    )
    init_rename: list[dict[str, Any]] = key(
        [],
        "Names in init_from get the names of the model: the first {match: PATTERN, to: NAME} that "
        "fits. Each * stands for any text, and those of `to` for what those of `match` have found.",
    )
    init_skip: list[str] = key(
        [],
        "Weights whose names fit one of these patterns are not loaded, such as a head of another "
        "shape: those of the model keep their initial values. Stored weights that the model does "
        "not have must be named here. A * stands for any text.",
    )
    branch_digest: str | None = key(
        None,
        "The run goes on from the checkpoint of another run with this digest. `resume --branch` "
        "fills it in.",
    )
    every_steps: int | None = key(
        200,
        "A checkpoint is written every this many steps. Null means not by steps.",
        count="steps",
        identity=False,
    )
    every_s: float | None = key(
        None,
        "A checkpoint is written when this much time has passed since the last one, by the clock "
        "of rank 0. With every_steps both ask for checkpoints. Null does not look at the time.",
        unit="seconds",
        above=0,
        identity=False,
    )
    keep: int = key(
        2,
        "This many checkpoints are kept, older ones are removed. It is at least 2, because the "
        "newest may be damaged.",
        unit="checkpoints",
        at_least=2,
        identity=False,
    )
    best: str | None = key(
        None,
        "An evaluation in which this metric is better than ever before, such as val/loss, saves a "
        "checkpoint, which is kept and marked as the best. Null keeps no best checkpoint.",
        identity=False,
    )


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
