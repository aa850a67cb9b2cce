"""The MLflow store, named by a URI: check the URI, and see whether the store is ready.

    check_uri("sqlite:////data/mlflow.db")     a local file
    check_uri("http://tracking:5000")          a server
    check_store(uri, "mnist")                  before a run: 1 ms

This module does not import mlflow, which takes seconds and 14,000 file-system calls. It talks to a
server by plain HTTP, and to a SQLite store with the standard library. What is not there, the first
uploader makes, which imports mlflow anyway (`uploading.client`).

Every process imports this module and few need HTTP, so `server` is imported inside functions.
"""

import errno
import hashlib
import logging
import os
import posixpath
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from hpctrain.base.errors import RefusedError, TrackingError, deleted_experiment
from hpctrain.base.files.disk import owner_name
from hpctrain.base.files.lock import file_lock, patience, why_no_locks
from hpctrain.base.files.mounts import TABLE, mount_of
from hpctrain.base.secrets import mask

log = logging.getLogger(__name__)

_LOCK_SECONDS, _PATIENCE_S = 120.0, 1.0
_LONGEST_KEY = 250  # characters


def check_uri(uri: str, mounts: Path = TABLE) -> None:
    """Check that a store with this URI can work; the TrackingError says what to do instead."""
    if is_server(uri):
        if (masked := mask(uri)) != uri:
            raise TrackingError(
                f"tracking.uri={masked} must not hold a password or token, since it is written to "
                "run directories; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN, instead"
            )
        return
    path = sqlite_path(uri)
    try:
        if path.stat().st_uid != os.geteuid():
            raise TrackingError(_not_ours(uri, path.resolve()))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TrackingError(
                f"tracking.uri={uri}: {path}: a link in this path leads to itself"
            ) from None
    # SQLite needs locks and memory maps that are consistent between hosts.
    if (mount := mount_of(path, mounts)).kind == "network":
        why = f"{path} is on a network file system ({mount.type}), where SQLite loses data"
        raise TrackingError(f"tracking.uri={uri}: {why}. {_ELSEWHERE}")


_ELSEWHERE = (
    "Either start a server next to the file system, `mlflow server --host 0.0.0.0 "
    "--backend-store-uri ...`, and set tracking.uri=http://HOST:5000; or name a path on a local "
    "disk; or set tracking.upload=false, and `hpctrain status --upload --uri URI` later"
)


def resolve_uri(uri: str, base: Path) -> str:
    """Return `uri` with an absolute sqlite path; a relative one is relative to `base`."""
    return uri if is_server(uri) else f"sqlite:///{os.path.realpath(base / sqlite_path(uri))}"


def is_server(uri: str) -> bool:
    """Return whether `uri` names an MLflow server."""
    return uri.startswith(("http://", "https://"))


def sqlite_path(uri: str) -> Path:
    """Return the file of a `sqlite:///` URI."""
    prefix, path = uri[:10], uri[10:]
    if prefix != "sqlite:///" or path in ("", ":memory:") or "?" in path:
        raise TrackingError(_no_store(uri))
    return Path(path)


def _no_store(uri: str) -> str:
    hint = (
        "; bring the runs of MLflow's file store into a database: `mlflow migrate-filestore "
        "--source mlruns --target sqlite:///mlflow.db`"
        if uri.startswith(("file:", "/", ".")) or ":" not in uri
        else ""
    )
    return (
        f"tracking.uri={uri!r} must be sqlite:///mlflow.db (or another file, without '?') or "
        f"http(s)://HOST:PORT of an MLflow server{hint}"
    )


def opened(path: Path, mode: str) -> "closing[sqlite3.Connection]":
    """Return a context with an open SQLite database, read-only with the mode `ro`."""
    return closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True))


def is_made(path: Path) -> bool:
    """Return whether there is a SQLite database with tables. The caller holds `write_lock`.

    What is no database is a TrackingError; an OSError may pass.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
    try:
        # Not read-only: SQLite first undoes what a killed process has left unfinished.
        with opened(path, "rw") as database:
            return database.execute(tables).fetchone() is not None
    except sqlite3.OperationalError as error:
        raise OSError(f"{path}: {error}") from error  # such as a lock
    except sqlite3.DatabaseError as error:
        raise TrackingError(f"{path}: not an MLflow store ({error})") from error


def check_store(uri: str, experiment: str) -> bool:
    """Check that the uploader of a run can use a store; it makes what is not there.

    The result is False if the store does not take the run now: then a warning says why, and the
    journal keeps everything until it does. An unusable store is a TrackingError.
    """
    check_uri(uri)
    try:
        if is_server(uri):
            from hpctrain.tracking import server

            server.check_experiment(uri, experiment)
        elif not _has_experiment(uri, experiment):
            _check_sqlite(uri)
    except RefusedError as error:
        problem = str(error)
    except OSError as error:
        problem = f"tracking.uri={uri} does not answer now ({error})"
    else:
        return True
    log.warning(
        "%s. Metrics stay in the run's journal; the uploader or `python -m hpctrain status "
        "--upload` carries them over once the store takes them",
        problem,
    )
    return False


def _has_experiment(uri: str, experiment: str) -> bool:
    """Return whether a SQLite store has an experiment; a deleted one is a RefusedError."""
    query = "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ?"
    try:
        with opened(sqlite_path(uri), "ro") as database:
            row = database.execute(query, (experiment,)).fetchone()
    except sqlite3.Error:
        return False  # no store yet, or none at all
    if row and row[1] != "active":
        raise deleted_experiment(uri, experiment, str(row[0]))
    return row is not None


def _check_sqlite(uri: str) -> None:
    """Check that an uploader can make a SQLite store here, or an experiment in it."""
    path = sqlite_path(uri).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(TimeoutError), write_lock(uri, _PATIENCE_S):  # else somebody writes there now
            if why := why_no_locks(path.parent, alone=True):
                raise TrackingError(f"tracking.uri={uri}: SQLite needs locks; {why}. {_ELSEWHERE}")
            is_made(path)
    except PermissionError as error:
        raise TrackingError(_not_ours(uri, Path(error.filename or path))) from error
    except OSError as error:
        raise TrackingError(f"tracking.uri={uri}: {error}") from error


def _not_ours(uri: str, path: Path) -> str:
    """Return the error for a store, or its folder, of somebody else, with the cure."""
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    return (
        f"tracking.uri={uri}: {there} belongs to {owner_name(there)}, and a SQLite store is for "
        "one user: name one of your own, tracking.uri=sqlite:////PATH/mlflow.db, or for a group a "
        "server, tracking.uri=http://HOST:5000; or give an output_dir of your own; "
        "tracking.upload=false keeps the metrics in the run's journal"
    )


@contextmanager
def write_lock(uri: str, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold the lock for one write to a SQLite store, or raise TimeoutError; no server has one."""
    if is_server(uri):
        yield
        return
    path = sqlite_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(beside(path, "lock"), patience(seconds, str(path))):
        yield


def beside(path: Path, suffix: str) -> Path:
    """Return the path of a hidden file in the folder of `path`: `.NAME.SUFFIX`."""
    return path.with_name(f".{path.name}.{suffix}")


def clean_key(key: str) -> str:
    """Return a key as MLflow takes it: `acc_1` for `acc@1`, `a/b` for `a//b/`.

    It has letters, digits, `_`, `-`, `.`, blanks, `:` and `/`, at most 250 characters: of a longer
    one 241, and a digest.
    """
    key = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", key)).lstrip("/")
    if key in ("", ".") or key.startswith(".."):
        key = f"_{key}"
    if len(key) > _LONGEST_KEY:
        key = f"{key[: _LONGEST_KEY - 9]}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    return key
