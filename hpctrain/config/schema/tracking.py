"""The keys of `tracking`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.key import key


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
