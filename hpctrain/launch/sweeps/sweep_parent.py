"""The parent run of a sweep in MLflow, and the runs that a sweep takes as they are.

    train alone ── "finished before" in a sweep ── run.json, journal/meta.json: the parent
                                                └─ `status --upload`, beside the submission: MLflow

MLflow shows a run under one parent only. A run keeps its first one: a later sweep with the same run
does not take it away from the earlier sweep.
"""

import dataclasses
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.child import python_module
from hpctrain.errors import TrackingError
from hpctrain.launch.entry import Entry
from hpctrain.runs import sweep_overrides
from hpctrain.tracking.meta import Meta

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


def adopt(
    entries: Sequence[Entry], parent: dict[str, str], folder: Path
) -> subprocess.Popen[bytes] | None:
    """Put runs that have no parent under this one, after `set_states` and the submission.

    The process that tells MLflow, with its log in `folder`, need not be waited for; it is None if
    there is nothing to tell.
    """
    changed = []
    for entry in entries:
        # The runs that were submitted have their parent already.
        if not entry.before.state or entry.before.sweep or entry.run.read().sweep:
            continue
        # Without a journal, or if the run is somebody else's, there is nothing to do.
        with suppress(OSError, TrackingError):
            entry.run.update(**entry.place_in(parent))
            meta = Meta.read(entry.run.path)
            if not meta.is_ours:  # a file of this user would vouch for the store that it names
                continue
            adopted = dataclasses.replace(
                meta, parent_uid=parent["uid"], parent_name=parent["name"]
            )
            adopted.write(entry.run.path)
            if entry.config.tracking.upload:
                changed.append(str(entry.run.path))
    if not changed:
        return None
    # Importing mlflow and asking the store takes seconds.
    command, env = python_module("hpctrain", "status", "--upload", *changed)
    with suppress(OSError), (folder / _LOG).open("ab") as log:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return None
