"""Tracking: metrics go into a journal, and later from there into MLflow, exactly once.

Importing this package never imports mlflow.
"""

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
