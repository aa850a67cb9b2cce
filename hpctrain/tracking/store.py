"""The MLflow store as a URI: which are allowed, whether one is ready, making it so.

    check_uri("sqlite:////data/mlflow.db")     a local file
    check_uri("http://tracking:5000")          a server
    initialise(uri, "mnist")                   once, before any job; then milliseconds

mlflow itself is not imported here: that costs seconds and 14,000 file-system calls. A server is
asked by plain HTTP, a SQLite store by the standard library; only a store that does not exist yet
is made by a subprocess, since many processes that find a fresh one at once would all migrate it
and most would die.

Every process imports this file, and few need HTTP: `server` is imported where it is needed.
"""

import re
import sqlite3
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hpctrain.errors import TrackingError
from hpctrain.lock import file_lock, patience
from hpctrain.tracking.process import python_module

# SQLite needs locks and mapped pages that agree between hosts. These do not promise them.
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs|fhgfs|ceph|cifs|smb\w*|9p|afs|panfs|pvfs2|orangefs|wekafs|ocfs2|"
    r"gfs2|glusterfs|fuse\.(ceph|dfuse|sshfs|glusterfs|juicefs|rclone|s3fs|gcsfuse)"
)

_LOCK_SECONDS = 120.0


def check_uri(uri: str, mounts: Path = Path("/proc/mounts")) -> None:
    """Refuse a store that cannot work.

    Args:
        uri: `tracking.uri`: `sqlite:///file.db` (relative), `sqlite:////file.db`, `http(s)://...`.
        mounts: The mount table.

    Raises:
        TrackingError: It says what to do instead.
    """
    if is_server(uri):
        if urllib.parse.urlsplit(uri).password:
            raise TrackingError(
                "tracking.uri must not hold a password, since it is written to run directories; "
                "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead"
            )
        return
    path = sqlite_path(uri)
    kind = file_system(path, mounts)
    if NETWORK_FILE_SYSTEMS.fullmatch(kind):
        raise TrackingError(
            f"tracking.uri={uri}: {path} is on a network file system ({kind}), where SQLite loses "
            f"data. Either start a server next to the file system, `mlflow server --host 0.0.0.0 "
            f"--backend-store-uri ...`, and set tracking.uri=http://HOST:5000; or name a path on a "
            f"local disk; or set tracking.upload=false and upload later with "
            f"`python -m hpctrain sync --uri URI`"
        )


def resolve_uri(uri: str, base: Path) -> str:
    """`uri` with a relative sqlite path made absolute, from `base`."""
    return uri if is_server(uri) else f"sqlite:///{(base / sqlite_path(uri)).resolve()}"


def is_server(uri: str) -> bool:
    """Whether `uri` names an MLflow server."""
    return uri.startswith(("http://", "https://"))


def sqlite_path(uri: str) -> Path:
    """The file of a `sqlite:///` URI.

    Raises:
        TrackingError: It is no such URI.
    """
    prefix, path = uri[:10], uri[10:]
    if prefix != "sqlite:///" or path in ("", ":memory:") or "?" in path:
        hint = (
            "; MLflow has removed its file store"
            if uri.startswith(("file:", "/", ".")) or ":" not in uri
            else ""
        )
        raise TrackingError(
            f"tracking.uri={uri!r} must be sqlite:///mlflow.db (or another file, without '?') or "
            f"http(s)://HOST:PORT of an MLflow server{hint}"
        )
    return Path(path)


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`, or will; "" if unknown."""
    path = path.absolute().resolve()
    best, kind = -1, ""
    try:
        table = mounts.read_text(errors="surrogateescape")
    except OSError:
        return ""
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        # Blanks in a mount point are written in octal.
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[1])
        # Of two mounts on one point the later hides the earlier.
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind


def is_ready(uri: str, experiment: str) -> bool:
    """Whether the store is there and holds `experiment`. Cheap: no mlflow."""
    if is_server(uri):
        from hpctrain.tracking import server

        try:
            return server.has_experiment(uri, experiment)
        except OSError:
            return False
    path = sqlite_path(uri)
    if not path.is_file():
        return False
    query = "SELECT 1 FROM experiments WHERE name = ? AND lifecycle_stage = 'active'"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return database.execute(query, (experiment,)).fetchone() is not None
    except sqlite3.Error:
        return False


def initialise(uri: str, experiment: str) -> bool:
    """Create the store and the experiment unless they are there. Any number may call at once.

    Returns:
        True if the store is ready. False if it is a server that does not answer now: no error,
        since the journal keeps everything until it does.

    Raises:
        TrackingError: The store is unusable.
    """
    check_uri(uri)
    if is_server(uri):
        from hpctrain.tracking import server

        return server.initialise(uri, experiment)
    if is_ready(uri, experiment):
        return True
    path = sqlite_path(uri).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever comes second waits here and then finds the work done, without importing mlflow.
        with file_lock(beside(path, "init.lock"), patience(_LOCK_SECONDS, str(path))):
            if not is_ready(uri, experiment):
                _initialise_sqlite(uri, experiment, path.parent)
    except OSError as error:
        raise TrackingError(f"tracking.uri={uri}: {error}") from error
    return True


@contextmanager
def write_lock(uri: str, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold the store for one write. A server has its own order; a SQLite file has one writer."""
    if is_server(uri):
        yield
        return
    path = sqlite_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(beside(path, "lock"), patience(seconds, str(path))):
        yield


def beside(path: Path, suffix: str) -> Path:
    """A hidden companion of `path`."""
    return path.with_name(f".{path.name}.{suffix}")


def _initialise_sqlite(uri: str, experiment: str, folder: Path) -> None:
    command, env = python_module("hpctrain.tracking.client", uri, experiment)
    # In the store's own folder: MLflow derives the default experiment's artifact path from it.
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOCK_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise TrackingError(f"tracking.uri={uri}: not ready after {_LOCK_SECONDS:g} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise TrackingError(f"tracking.uri={uri}: MLflow cannot make the store: {''.join(last)}")
