"""Put on the page of a run in MLflow what is neither a metric, a param nor a tag.

    artifact   a file of the run directory: an image, a figure
    dataset    the data that the run trains on, as MLflow's dataset input
    status     texts without secrets, also for a run that was killed: at the start of an attempt
               config.yaml and provenance/*, at its end the tails of logs

All of this can be sent twice without a trace: a file replaces itself, and MLflow knows an input
by its name and digest. Metrics, params, tags and the status do not wait for it: the store of the
artifacts may be elsewhere, and not be there. What could not be sent is named in the log, and is
tried again later: uploaded.json has a position of its own for files.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.files.disk import open_regular
from hpctrain.base.secrets import mask
from hpctrain.tracking.uploading.mlrun import DeletedError, MlflowRun

log = logging.getLogger(__name__)

_LONGEST_DIGEST = 36  # characters: MLflow's limit
_MOST_BYTES = 1 << 20  # of a text
_TAIL = 64 << 10  # bytes of a log
_MOST_LOGS = 8
_LOG = re.compile(r"(?P<job>.+?)(\.rank|_)(?P<rank>\d+)(\.log|_log\.out)$")
_ERROR = re.compile(r"^(Traceback \(most|error: |\[rank\d+\]: Traceback|Fatal Python)", re.M)


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
                _at_start(run_dir)
                if status == "RUNNING"
                else _at_end(run_dir, failed=status in ("FAILED", "KILLED"))
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


def _at_start(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of the config, and of where code and packages are from."""
    for path in (run_dir / "config.yaml", *sorted((run_dir / "provenance").glob("*"))):
        content = _end_of(path, _MOST_BYTES, parts=len(path.relative_to(run_dir).parts))
        if content:
            yield str(path.relative_to(run_dir)), content


def _at_end(run_dir: Path, failed: bool) -> Iterator[tuple[str, str]]:
    """Yield name and content of the ends of the logs.

    If the attempt has failed, logs of other ranks that have an error are there as well.
    """
    for path in _logs(run_dir / "logs", failed):
        if content := _end_of(path, _TAIL):
            yield f"logs/{path.name}", content


def _logs(folder: Path, failed: bool) -> list[Path]:
    """Return the logs to show: that of rank 0, and after a failure those that have an error."""
    dated = [
        (path.lstat().st_mtime, int(match["rank"]), path)
        for path in folder.glob("*")
        if (match := _LOG.match(path.name))
    ]
    dated.sort(reverse=True)
    main = [path for _, rank, path in dated if rank == 0][:1]
    if not failed:
        return main
    others = (path for _, rank, path in dated if rank)
    wrong = [path for path in others if _ERROR.search(_end_of(path, _TAIL))]
    return main + wrong[: _MOST_LOGS - len(main)]


def _end_of(path: Path, size: int, parts: int = 2) -> str:
    """Return the end of a text file without secrets; "" if it is a link or no regular file.

    A link of somebody else could lead to a private file of the user who uploads the run.
    """
    try:
        with open_regular(path, parts) as file:
            whole = file.seek(0, 2)
            file.seek(max(0, whole - size))
            content = file.read(size).decode(errors="replace")
    except OSError:
        return ""
    if whole > size:
        content = f"... (only the last {size >> 10} KiB)\n{content.partition(chr(10))[2]}"
    return mask(content)
