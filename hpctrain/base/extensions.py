"""What other packages bring, by their entry points. Nothing is imported before it is asked for."""

import logging
from importlib.metadata import entry_points
from typing import Any

log = logging.getLogger(__name__)


def of_others(group: str, name: str) -> Any:
    """Return what another package offers under a name in a group of entry points; None if nobody.

    One that cannot be imported is told and left out.
    """
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:
            log.warning("%s: %s (%s) is left out: %s", group, name, entry.value, error)
    return None
