"""What extensions give to the core, by name: the core never imports an extension.

extensions.yaml ── our own: a name, and `module` or `module:attribute` ──┐
entry points of the group hpctrain.commands ── those of other packages ──┴── offered, of_others

Nothing is imported before it is asked for.
"""

import functools
import importlib
import logging
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpctrain.base.files import yaml_file

log = logging.getLogger(__name__)


@functools.cache
def _table() -> dict[str, str]:
    found: dict[str, str] = yaml_file.read(Path(__file__).parents[1] / "extensions.yaml")
    return found


def offered(name: str) -> Any:
    """Return what an extension of ours offers under a name."""
    module, _, attribute = _table()[name].partition(":")
    found = importlib.import_module(module)
    return attrgetter(attribute)(found) if attribute else found


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
