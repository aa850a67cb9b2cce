"""Make the trackers beside MLflow that `tracking.also` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.job.building.make import make
from hpctrain.trackers import OtherTracker


def other_trackers(nodes: Sequence[Mapping[str, Any]]) -> list[OtherTracker]:
    """Return the trackers.

    Raises:
        ConfigError: One of them cannot be made, or is no tracker.
    """
    made = [make(f"tracking.also[{i}]", node) for i, node in enumerate(nodes)]
    for i, tracker in enumerate(made):
        if not isinstance(tracker, OtherTracker):
            raise ConfigError(
                f"tracking.also[{i}]={nodes[i]}: it makes a {type(tracker).__name__}; it must be a "
                "class that inherits from hpctrain.trackers.OtherTracker"
            )
    return made
