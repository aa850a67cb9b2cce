"""MLflow itself: the only module, with its user `mlrun`, that imports it.

`python -m hpctrain.tracking.client URI EXPERIMENT` makes a SQLite store (see `store.initialise`).
"""

import logging
import os
import sys
from typing import Any, Literal

from hpctrain.errors import TrackingError
from hpctrain.tracking import store

log = logging.getLogger(__name__)

_FATAL = {
    "CUSTOMER_UNAUTHORIZED",
    "INVALID_STATE",
    "PERMISSION_DENIED",
    "RESOURCE_DOES_NOT_EXIST",
    "UNAUTHENTICATED",
}


def connect(uri: str) -> Any:
    """An `MlflowClient` of the store; it asks nothing of it yet."""
    _configure()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _configure() -> None:
    # Our own loop does the retrying: MLflow's defaults hang for minutes in a single call.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # No calls home from compute nodes.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"


def experiment_id(client: Any, uri: str, name: str) -> str:
    """Find or create the experiment, and with it a SQLite store. Call it under the write lock."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = None if store.is_server(uri) else _artifacts(uri)
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)
    if experiment.lifecycle_stage != "active":
        raise TrackingError(f"tracking.experiment={name} was deleted in {uri}: restore it")
    return str(experiment.experiment_id)


def _artifacts(uri: str) -> str:
    # MLflow's default is ./mlruns of whichever process happens to come first.
    return (store.sqlite_path(uri).absolute().parent / "mlartifacts").as_uri()


def nature(error: Exception) -> Literal["transient", "rejected", "fatal"]:
    """Whether trying again can help, the data is at fault, or nothing will help."""
    code = getattr(error, "error_code", None)
    if code is None:
        waits = isinstance(error, OSError) or type(error).__module__.startswith("sqlalchemy.")
        return "transient" if waits and not isinstance(error, PermissionError) else "fatal"
    if code == "INVALID_PARAMETER_VALUE":
        return "rejected"
    if code in _FATAL or "out-of-date database schema" in str(error):
        return "fatal"
    # Even BAD_REQUEST: a server says so when its pool of database connections is exhausted.
    return "transient"


def main(argv: list[str]) -> int:
    """Make the store and the experiment."""
    uri, experiment = argv
    try:
        with store.write_lock(uri):
            _configure()
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            # MLflow pastes this path into its SQL: as a URI it holds no quotes.
            SqlAlchemyStore(uri, _artifacts(uri))
            experiment_id(connect(uri), uri, experiment)
    except Exception as error:
        # One line, the last of stderr, is what the caller shows.
        log.exception("initialise")
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
