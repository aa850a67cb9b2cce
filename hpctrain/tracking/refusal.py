"""Why a store does not take a run: it does not answer, or it answers and refuses."""

from __future__ import annotations

from hpctrain.errors import TrackingError


class RefusedError(TrackingError):
    """The store answers, and refuses: a wrong password or token, a deleted experiment."""


class OfflineError(TrackingError):
    """The store does not answer now."""


def deleted(uri: str, experiment: str, number: str) -> RefusedError:
    """Return the error for an experiment that was deleted, with the command that restores it."""
    return RefusedError(
        f"tracking.experiment={experiment} was deleted in {uri}: choose another name, or restore "
        f"it: `MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id {number}`"
    )
