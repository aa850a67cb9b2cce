"""What extensions give to the core, by name: the core never imports an extension.

extensions.yaml ── our own: a name, and `module` or `module:attribute` ──┐
entry points of the group hpctrain.parts ── those of other packages ─────┴── offered, others

Nothing is imported before it is asked for.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
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


def others(group: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what other packages offer in a group of entry points, by name.

    One that cannot be imported is told and left out.
    """
    for entry in sorted(entry_points(group=group), key=lambda each: each.name):
        try:
            yield entry.name, entry.load()
        except Exception as error:
            log.warning("%s %s of %s is left out: %s", group, entry.name, entry.value, error)
