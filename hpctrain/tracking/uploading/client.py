"""The connection to MLflow. Only this module and `mlrun` import mlflow."""

import logging
import os
from pathlib import Path
from typing import Any, Literal

from hpctrain.base.errors import deleted_experiment
from hpctrain.base.files import disk
from hpctrain.tracking import store

log = logging.getLogger(__name__)

_OLD_SCHEMA = "out-of-date database schema"
_FATAL = {
    "CUSTOMER_UNAUTHORIZED",
    "INVALID_STATE",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}


def connect(uri: str) -> Any:
    """Return an `MlflowClient` for the store; create a missing SQLite store.

    The caller must hold `store.write_lock`, because MLflow opens a SQLite store at once. It sends
    no request to a server yet. Call `import_mlflow` before taking the lock.
    """
    from mlflow import MlflowClient

    if not store.is_server(uri):
        _make_missing(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def import_mlflow() -> None:
    """Import mlflow with our settings, which takes seconds."""
    disk.give_home(os.environ)
    # `MlflowRun` retries in its own loop: with MLflow's defaults one call can hang for minutes.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # Compute nodes must not send usage data to MLflow's makers.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    import mlflow  # noqa: F401


def experiment_id(client: Any, uri: str, name: str) -> str:
    """Return the id of the experiment `name`; create the experiment if it does not exist.

    The caller must hold `store.write_lock`.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = None if store.is_server(uri) else _place(uri)
        # If another process has just created it on a server, the caller tries again.
        return str(client.create_experiment(name, artifact_location=artifacts))
    if experiment.lifecycle_stage != "active":
        raise deleted_experiment(uri, name, str(experiment.experiment_id))
    return str(experiment.experiment_id)


def _make_missing(uri: str) -> None:
    """Create the SQLite store if it does not exist.

    The store is made under another name and then renamed: MLflow cannot use or mend the half of a
    store that a killed process leaves.
    """
    path = store.sqlite_path(uri).absolute()
    if store.is_made(path):
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    unfinished = store.beside(path, "new")
    # A process that was killed has left them. SQLite would apply the journal to the new file.
    for old in (unfinished, Path(f"{unfinished}-journal"), Path(f"{path}-journal")):
        old.unlink(missing_ok=True)
    # MLflow inserts the artifact path into its SQL unescaped; a URI contains no quotes.
    SqlAlchemyStore(f"sqlite:///{unfinished}", _place(uri)).engine.dispose()
    if not store.is_made(path):  # the `mlflow` command may have made one, since it takes no lock
        unfinished.replace(path)
        disk.sync(path.parent)


def _place(uri: str) -> str:
    # MLflow's default is ./mlruns in the working directory of the process that comes first.
    return store.sqlite_path(uri).absolute().with_name("mlartifacts").as_uri()


def nature(error: Exception) -> Literal["transient", "deleted", "rejected", "fatal"]:
    """Classify an error of a call to MLflow.

    "transient": another try can succeed. "deleted": the run was deleted in MLflow and must be
    restored. "rejected": the data is at fault. "fatal": none of this can help.
    """
    code = getattr(error, "error_code", None)
    if code is None:
        storage = isinstance(error, OSError) or type(error).__module__.startswith("sqlalchemy.")
        return "transient" if storage and not isinstance(error, PermissionError) else "fatal"
    if code == "INVALID_PARAMETER_VALUE":
        # MLflow has no error code of its own for a deleted run.
        return "deleted" if "must be in the 'active' state" in str(error) else "rejected"
    if code in _FATAL or _OLD_SCHEMA in str(error):
        return "fatal"
    # BAD_REQUEST too: a server answers so when its pool of database connections is exhausted.
    return "transient"
