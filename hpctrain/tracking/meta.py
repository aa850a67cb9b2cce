"""The small files beside the journal: its destination, and what is uploaded already.

<run_dir>/journal/meta.json       written by the tracker, read by the uploader
<run_dir>/journal/uploaded.json   written by the uploader, read by `hpctrain status --upload`
"""

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from hpctrain.base import secrets
from hpctrain.base.errors import DamageError, TrackingError
from hpctrain.base.files.disk import owner_name, write_atomically
from hpctrain.base.files.lock import is_locked
from hpctrain.base.files.record import Count, matching, read_owned
from hpctrain.tracking import samples
from hpctrain.tracking.journal import journal_path, read
from hpctrain.tracking.store import is_server

_Name = Annotated[str, matching("[^/]*", "the name of a file, without /")]


@dataclass(frozen=True)
class Meta:
    """The destination of a journal: an MLflow store, and the names of the run there.

    Only the password of the URI, and in a path of one's own a secret, is written as a reference and
    read back. Everything else goes to the store as it stands in the file: `${oc.env:NAME}` in the
    file of somebody else must not send them a variable of this process.
    """

    VERSION: ClassVar[int] = 1

    uri: str  # the MLflow store: an absolute sqlite path, or a server
    experiment: str
    run_name: str
    uid: str  # our own id of the run, stored as a tag in MLflow: its run id cannot be chosen
    parent_uid: _Name | None = None  # the id of the sweep that the run belongs to
    parent_name: str | None = None
    # The user id that `meta.json` belongs to; None if it was not read.
    owner: int | None = dataclasses.field(default=None, compare=False)

    def write(self, run_dir: Path) -> None:
        """Write `meta.json`."""
        _write(run_dir, "meta.json", self)

    @classmethod
    def read(cls, run_dir: Path) -> "Meta":
        """Read `meta.json`."""
        path = run_dir / "journal" / "meta.json"
        try:
            found, owner = read_owned(cls, path, parts=2)
        except FileNotFoundError:
            raise TrackingError(f"not a tracked run directory (no {path})") from None
        except DamageError as error:
            raise TrackingError(str(error)) from error
        return dataclasses.replace(found, uri=_expanded(found.uri, owner), owner=owner)


def check_known(meta: Meta, run_dir: Path) -> None:
    """Check that the store of a run is one that this user has chosen.

    Requests to a server carry the user's credentials for MLflow, so they must not go to a server
    that only a file of somebody else names. Nor is a database of that name written.

    If it is not, the TrackingError says how to choose it.
    """
    chosen = os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/")
    if meta.owner in (None, os.geteuid()) or chosen == meta.uri.rstrip("/"):
        return
    owner = owner_name(run_dir / "journal" / "meta.json")
    uri = secrets.mask(meta.uri)
    raise TrackingError(
        f"this run belongs to {owner}, and its journal/meta.json names the store {uri}: nothing "
        "was sent there, since your credentials for MLflow would go with it. If you know that "
        f"store, say so: `python -m hpctrain status --upload --uri {shlex.quote(uri)} "
        f"{shlex.quote(str(run_dir))}`, or set MLFLOW_TRACKING_URI to it"
    )


@dataclass(frozen=True)
class Uploaded:
    """What the uploader has uploaded. This is a copy: the position that counts is in the store."""

    VERSION: ClassVar[int] = 1

    uri: str
    uid: str
    experiment_id: str
    run_id: str
    offset: Count  # the position in the journal
    parent_uid: str | None = None  # the sweep that the run is under in MLflow
    # Why the rest cannot be uploaded, with the cure; "" if the uploader has not been stopped.
    problem: str = ""
    # The position in the samples of each node (`hpctrain.insight.monitor`).
    samples: dict[str, Count] = dataclasses.field(default_factory=dict)
    # The files of all records before this position are stored. An older version has noted the
    # positions of records that wait instead.
    files: Count | None = None
    waiting: list[Count] = dataclasses.field(default_factory=list)

    @property
    def files_stored(self) -> int:
        """The position before which the files of all records are in the store."""
        return min(self.waiting, default=self.offset) if self.files is None else self.files

    def write(self, run_dir: Path) -> None:
        """Write `uploaded.json`."""
        _write(run_dir, "uploaded.json", self)

    @classmethod
    def read(cls, run_dir: Path) -> "Uploaded | None":
        """Read `uploaded.json`; None if nothing has been uploaded."""
        try:
            found, owner = read_owned(cls, run_dir / "journal" / "uploaded.json", parts=2)
        except (FileNotFoundError, DamageError):
            return None
        return dataclasses.replace(found, uri=_expanded(found.uri, owner))


def is_uploaded(run_dir: Path, meta: Meta) -> bool:
    """Return whether everything is in the store of `meta`, according to `uploaded.json`."""
    note = Uploaded.read(run_dir)
    if note is None or note.problem or note.files_stored < note.offset:
        return False
    if (note.uri, note.uid, note.parent_uid) != (meta.uri, meta.uid, meta.parent_uid):
        return False
    if read(journal_path(run_dir), note.offset, limit=1)[0]:
        return False
    return not any(samples.new(run_dir, note.samples))


def left_behind(run_dir: Path) -> str:
    """Return what is missing of a run that has ended, and the command that uploads it.

    It is "" if everything is in MLflow, an uploader is at work on this host, or the run is not
    uploaded by itself (`tracking.upload=false`).
    """
    uploading = journal_path(run_dir).with_name("upload.lock")
    try:
        if uploading.exists() and not os.access(uploading, os.R_OK):
            return ""  # another user's run, whose lock cannot be seen
        if is_uploaded(run_dir, Meta.read(run_dir)) or is_locked(uploading):
            return ""
    except (TrackingError, OSError):
        return ""  # not tracked, or not by hpctrain
    # The tracker has made this file when it started the uploader.
    if not journal_path(run_dir).with_name("uploader.log").exists():
        return ""
    return (
        "its uploader has ended, and not everything is in MLflow; "
        f"`python -m hpctrain status --upload {run_dir}` uploads the rest"
    )


def _expanded(uri: str, owner: int) -> str:
    if owner != os.geteuid():
        return uri
    return secrets.expand_password(uri) if is_server(uri) else secrets.expand(uri)


def _write(run_dir: Path, name: str, value: Meta | Uploaded) -> None:
    body = {"version": value.VERSION, **dataclasses.asdict(value)}
    body.pop("owner", None)
    # A password in the URI is not written, only a reference to it.
    body = {key: secrets.reference(v) if isinstance(v, str) else v for key, v in body.items()}
    folder = run_dir / "journal"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / name, json.dumps(body, indent=2) + "\n", sync=False)
