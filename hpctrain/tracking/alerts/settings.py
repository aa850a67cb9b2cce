"""What a run has to say of its alerts: the file `journal/notify.json`, without the webhook itself.

    {"variable": "HPCTRAIN_WEBHOOK", "on": ["failed"]}

The address of a webhook is a secret, so only the variable that holds it is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpctrain.disk import write_atomically
from hpctrain.errors import DamageError
from hpctrain.record import Record, read_owned, written


class Settings(Record, frozen=True):
    """What is told, and where."""

    variable: str  # the variable of the environment that holds the address
    on: tuple[str, ...]  # the events that are told

    def write(self, run_dir: Path) -> None:
        """Write the file."""
        path = _path(run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, written(self), sync=False)

    @classmethod
    def read(cls, run_dir: Path) -> Settings | None:
        """Read the file; None if there is none, or if somebody else has written it."""
        try:
            found, owner = read_owned(cls, _path(run_dir), parts=2)
        except (FileNotFoundError, DamageError):
            return None
        return found if owner == os.geteuid() else None


def variable_of(url: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable of the environment that holds an address; None if none does."""
    return min((name for name, value in environ.items() if value == url), default=None)


def remove(run_dir: Path) -> None:
    """Remove the file of an attempt before: this one tells nothing."""
    _path(run_dir).unlink(missing_ok=True)


def _path(run_dir: Path) -> Path:
    return run_dir / "journal" / "notify.json"
