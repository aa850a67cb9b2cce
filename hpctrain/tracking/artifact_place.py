"""The place that an MLflow store names for files of runs: checked before anything is sent there.

A SQLite store may be written by others, who can name a folder of ours or any address there, and a
server keeps what each of its users has made. MLflow would follow, with the user's password.
"""

from os.path import realpath
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hpctrain.disk import is_own, owner_name
from hpctrain.errors import TrackingError


def root(database: Path) -> Path:
    """Return the folder of all files of a SQLite store, beside it."""
    # MLflow's default is ./mlruns in the working directory of the process that comes first.
    return database.absolute().with_name("mlartifacts")


def below(database: Path, place: str) -> Path:
    """Return a place relative to `root(database)`; a place elsewhere is a TrackingError."""
    home, parts = root(database), urlsplit(place)
    path = Path(url2pathname(parts.path))
    if parts.scheme in ("", "file") and not parts.netloc and ".." not in path.parts:
        # A link on the way to the folder of the store gives it two names.
        for each in (path, *path.parents):
            if each.name == home.name and realpath(each.parent) == realpath(home.parent):
                _check_link(home)
                return path.relative_to(each)
    whose = f"; the store belongs to {owner_name(database)}" if not is_own(database) else ""
    raise TrackingError(
        f"{database} names {place} for the files of its runs, which is not in {home}, so nothing "
        f"is sent there{whose}: choose another tracking.experiment, or a store of your own "
        "(tracking.uri)"
    )


def _check_link(home: Path) -> None:
    if home.is_symlink() and not is_own(home):
        raise TrackingError(
            f"{home} is a link that {owner_name(home)} has made, so nothing is written behind it: "
            "choose a store of your own (tracking.uri)"
        )


def check_of_server(uri: str, place: str) -> None:
    """Check that a server names no other server for files: it would get the user's password."""
    parts, own = urlsplit(place), urlsplit(uri)
    if parts.scheme not in ("http", "https", "mlflow-artifacts") or not parts.netloc:
        return
    if (parts.hostname, parts.port) != (own.hostname, own.port):
        raise TrackingError(
            f"tracking.uri={uri}: it names {place} for the files of its runs, which is another "
            "server, so nothing is sent there, nor your password for MLflow: choose another "
            "tracking.experiment"
        )
