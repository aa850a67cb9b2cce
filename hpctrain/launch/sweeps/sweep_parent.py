"""Give runs that a sweep takes as they are their place under the sweep's parent in MLflow.

    train alone ── "finished before" in a sweep ── run.json, journal/meta.json: the parent
                                                └─ `hpctrain sync`, beside the submission: MLflow

MLflow shows a run under one parent only. A run keeps its first one: a later sweep with the same run
does not take it away from the earlier sweep.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import TrackingError
from hpctrain.launch.arrays import Entry
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.uploader_process import python_module

_LOG = "mlflow.log"


def adopt(
    entries: Iterable[Entry], parent: dict[str, str], folder: Path
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
    command, env = python_module("hpctrain", "sync", *changed)
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
