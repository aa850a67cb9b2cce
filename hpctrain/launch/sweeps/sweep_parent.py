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
        """Return uid, name and folder of the parent; None for one run."""
        if len(entries) < 2:
            return None
        values = sweep_overrides.span(entry.swept for entry in entries)
        name = f"sweep {self._folder.name} {values}".strip()
        return {"uid": self._uid, "name": name, "folder": str(self._folder)}
