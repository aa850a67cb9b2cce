"""What a run has to say of its alerts: the file `journal/notify.json`, without the webhook itself.

    {"variable": "HPCTRAIN_WEBHOOK", "on": ["failed"]}

The address of a webhook is a secret, so only the variable that holds it is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpctrain.base.files.record import Message


class AlertSettings(Message, frozen=True):
    """What is told, and where."""

    BOX = "journal/notify.json"

    variable: str  # the variable of the environment that holds the address
    on: tuple[str, ...]  # the events that are told


def variable_of(url: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable of the environment that holds an address; None if none does."""
    return min((name for name, value in environ.items() if value == url), default=None)
