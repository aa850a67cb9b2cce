"""Put on the page of a run in MLflow what is neither a metric, a param nor a tag.

    artifact   a file of the run directory: an image, a figure
    dataset    the data that the run trains on, as MLflow's dataset input
    status     the texts of `run_files`: config, logs

All of this can be sent twice without a trace: a file replaces itself, and MLflow knows an input
by its name and digest. Metrics, params, tags and the status do not wait for it: the store of the
artifacts may be elsewhere, and not be there. What could not be sent is named in the log, and is
tried again later: uploaded.json has a position of its own for files.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.tracking.page import run_files
from hpctrain.tracking.uploading.mlrun import DeletedError, MlflowRun

log = logging.getLogger(__name__)

_LONGEST_DIGEST = 36  # characters: MLflow's limit


class _HopelessError(Exception):
    """What is to be published cannot be: another try would not help."""


def publish(run: MlflowRun, run_dir: Path, body: Mapping[str, Any]) -> bool:
    """Publish what belongs to one record; False: a later try may succeed."""
    match body["kind"]:
        case "artifact":
            return _tolerant(body["file"], lambda: _artifact(run, run_dir, body))
        case "dataset":
            return _tolerant(f"the data set {body['name']}", lambda: _dataset(run, body))
        case "status":
            status = body["status"]
            texts = (
                run_files.at_start(run_dir)
                if status == "RUNNING"
                else run_files.at_end(run_dir, failed=status in ("FAILED", "KILLED"))
            )
            sent = [
                _tolerant(name, lambda: run.send_text(content, name))  # noqa: B023
                for name, content in texts
            ]
            return all(sent)
    return True


def _tolerant(what: str, send: Callable[[], Any]) -> bool:
    """Call `send`; return False if another try may succeed later. Any error is only logged.

    It is the artifact's: of its file, of its place, or of a library that the place needs and that
    is not installed here. Everything else goes on.
    """
    try:
        send()
    except DeletedError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        log.error("%s is not in MLflow: %s", what, reason)
        return isinstance(error, _HopelessError)
    return True


def _artifact(run: MlflowRun, run_dir: Path, body: Mapping[str, Any]) -> None:
    root = run_dir.resolve()
    file = (root / str(body["file"])).resolve()
    if not file.is_relative_to(root):  # the journal of somebody else could name any file
        raise _HopelessError("it is not in the run directory")
    if not file.is_file():
        raise _HopelessError(f"it has vanished from the run directory: {file}")
    folder = str(body["to"])
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        raise _HopelessError("its folder is not one of the run")
    run.send(file, "" if folder == "." else folder)  # MLflow refuses "."
    if folder == "images":
        run.call_once("set_tag", "mlflow.loggedImages", "true")


def _dataset(run: MlflowRun, body: Mapping[str, Any]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    fields = [
        {
            "name": str(name),
            "type": "tensor",
            "tensor-spec": {"dtype": str(field["dtype"]), "shape": [-1, *field["shape"]]},
        }
        for name, field in body["fields"].items()
    ]
    data = Dataset(
        name=str(body["name"]),
        digest=str(body["digest"]).rpartition(":")[2][:_LONGEST_DIGEST],
        source_type="local",
        source=json.dumps({"uri": str(body["source"])}),
        schema=json.dumps({"mlflow_tensorspec": {"features": json.dumps(fields)}}),
        profile=json.dumps(dict(body["samples"])),
    )
    context = InputTag("mlflow.data.context", str(body["context"]))
    run.call_once("log_inputs", datasets=[DatasetInput(data, [context])])
