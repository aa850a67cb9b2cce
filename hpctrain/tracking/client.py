"""The connection to MLflow. Only this module and `mlrun` import mlflow.

`python -m hpctrain.tracking.client URI EXPERIMENT` creates a SQLite store; `store.initialise` runs
this command.
"""

import gc
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
    """Return an `MlflowClient` for the store. This sends no request yet."""
    _configure()
    first = "mlflow" not in sys.modules
    if first:
        gc.disable()  # the import makes many objects and drops few
    from mlflow import MlflowClient

    if first:
        gc.freeze()
        gc.enable()
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _configure() -> None:
    # `MlflowRun` retries in its own loop: with MLflow's defaults one call can hang for minutes.
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    # Compute nodes must not send usage data to MLflow's makers.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"


def experiment_id(client: Any, uri: str, name: str) -> str:
    """Return the id of the experiment `name`; create the experiment if it does not exist.

    The caller must hold `store.write_lock`: the first call also creates a missing SQLite store.
    """
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
    # MLflow's default is ./mlruns in the working directory of the process that comes first.
    return (store.sqlite_path(uri).absolute().parent / "mlartifacts").as_uri()


def nature(error: Exception) -> Literal["transient", "rejected", "fatal"]:
    """Classify an error of a call to MLflow.

    Returns:
        "transient" if another try can succeed, "rejected" if the data is at fault, "fatal" if
        neither another try nor other data can help.
    """
    code = getattr(error, "error_code", None)
    if code is None:
        storage = isinstance(error, OSError) or type(error).__module__.startswith("sqlalchemy.")
        return "transient" if storage and not isinstance(error, PermissionError) else "fatal"
    if code == "INVALID_PARAMETER_VALUE":
        return "rejected"
    if code in _FATAL or "out-of-date database schema" in str(error):
        return "fatal"
    # BAD_REQUEST too: a server answers so when its pool of database connections is exhausted.
    return "transient"


def main(argv: list[str]) -> int:
    """Create the store and the experiment; return the exit code."""
    uri, experiment = argv
    try:
        with store.write_lock(uri):
            _configure()
            from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

            # MLflow inserts this path into its SQL unescaped; a URI contains no quotes.
            SqlAlchemyStore(uri, _artifacts(uri))
            experiment_id(connect(uri), uri, experiment)
    except Exception as error:
        # The caller shows the last line of stderr.
        log.exception("initialise")
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
