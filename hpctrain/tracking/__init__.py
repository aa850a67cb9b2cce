"""Tracking: journal first, MLflow later and exactly once. Importing this never imports mlflow."""

from hpctrain.tracking.store import check_uri, initialise, is_ready, resolve_uri
from hpctrain.tracking.tracker import JournalTracker, NullTracker, Status, Tracker

__all__ = [
    "JournalTracker",
    "NullTracker",
    "Status",
    "Tracker",
    "check_uri",
    "initialise",
    "is_ready",
    "resolve_uri",
]
