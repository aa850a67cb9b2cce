"""The parent run of a sweep in MLflow.

MLflow shows a run under one parent only. A run keeps its first one: a later sweep with the same run
does not take it away from the earlier sweep.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch.entry import Entry
from hpctrain.runs import sweep_overrides

_LOG = "mlflow.log"


class Parent:
    """The parent run of a sweep whose folder is `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._uid = folder, uuid.uuid4().hex

    def of(self, entries: Sequence[Entry]) -> dict[str, str] | None:
        """Return uid, name, number of runs and folder of the parent; None for one run."""
        if len(entries) < 2:
            return None
        values = sweep_overrides.span(entry.swept for entry in entries)
        name = f"sweep {self._folder.name} {values}".strip()
        # A run that an earlier sweep has begun stays there, and tells this parent nothing.
        ours = {
            entry.run.path
            for entry in entries
            if (entry.before.sweep or {}).get("uid", self._uid) == self._uid
        }
        # In the folder is the list of the runs, from which their uploaders know what has not begun.
        return {
            "uid": self._uid,
            "name": name,
            "runs": str(len(ours)),
            "folder": str(self._folder),
        }
