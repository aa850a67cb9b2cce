"""The addresses of MLflow's pages, for people to open.

A fresh browser shows an experiment as a list of traces of language models. With the workflow in the
address it shows the training runs, and a run among them; a tag of the experiment does not do that.
"""

import re
from contextlib import suppress
from pathlib import Path

from hpctrain.base.errors import TrackingError
from hpctrain.base.secrets import mask
from hpctrain.tracking.meta import Meta, Uploaded
from hpctrain.tracking.store import is_server

_WORKFLOW = "?workflowType=machine_learning"
_UI = "http://127.0.0.1:5000"  # where `mlflow ui` serves a local store


def experiment_page(uri: str, experiment_id: str) -> str:
    """Return the address of an experiment's table; for a SQLite store that of `mlflow ui`."""
    return f"{_root(uri)}/#/experiments/{experiment_id}/runs{_WORKFLOW}"


def run_page(uri: str, experiment_id: str, run_id: str) -> str:
    """Return the address of the page of a run."""
    return f"{_root(uri)}/#/experiments/{experiment_id}/runs/{run_id}{_WORKFLOW}"


def pages_of(run_dir: Path) -> tuple[str, ...]:
    """Return the pages of a run and of its experiment, from what its uploader has noted.

    There are none while nothing of the run is in MLflow, or if it is now meant for another store.
    """
    note = Uploaded.read(run_dir)
    if note is None:
        return ()
    ids = note.experiment_id, note.run_id
    if not all(re.fullmatch(r"\w{1,64}", each) for each in ids):
        return ()  # a file of somebody else could hold anything
    with suppress(TrackingError):
        meta = Meta.read(run_dir)
        if (note.uri, note.uid) == (meta.uri, meta.uid):
            return run_page(note.uri, *ids), experiment_page(note.uri, note.experiment_id)
    return ()


def _root(uri: str) -> str:
    return mask(uri.rstrip("/")) if is_server(uri) else _UI
