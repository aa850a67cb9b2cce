"""The two small files beside the journal: its destination, and what is uploaded already.

<run_dir>/journal/meta.json       written by the tracker, read by the uploader
<run_dir>/journal/uploaded.json   written by the uploader, read by `hpctrain sync`
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain import secrets
from hpctrain.disk import write_atomically
from hpctrain.errors import TrackingError


@dataclass(frozen=True)
class Meta:
    """The destination of a journal: an MLflow store, and the names of the run there."""

    uri: str
    """The MLflow store: an absolute sqlite path, or a server."""
    experiment: str
    run_name: str
    uid: str
    """Our own id of the run, stored as a tag in MLflow: its run id cannot be chosen."""
    parent_uid: str | None = None
    """The id of the sweep that the run belongs to."""
    parent_name: str | None = None

    def write(self, run_dir: Path) -> None:
        """Write `meta.json`."""
        _write(_meta_path(run_dir), dataclasses.asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> "Meta":
        """Read `meta.json`."""
        path = _meta_path(run_dir)
        try:
            return cls(**_read(path))
        except FileNotFoundError:
            raise TrackingError(f"not a tracked run directory (no {path})") from None
        except (ValueError, TypeError) as error:
            raise TrackingError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Uploaded:
    """What the uploader has uploaded. This is a copy: the position that counts is in the store."""

    uri: str
    uid: str
    experiment_id: str
    run_id: str
    offset: int
    """The position in the journal."""
    parent_uid: str | None = None
    """The sweep that the run is under in MLflow."""
    problem: str = ""
    """Why the rest cannot be uploaded, with the cure; "" if the uploader has not been stopped."""

    def write(self, run_dir: Path) -> None:
        """Write `uploaded.json`."""
        _write(_uploaded_path(run_dir), dataclasses.asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> "Uploaded | None":
        """Read `uploaded.json`; None if nothing has been uploaded."""
        try:
            return cls(**_read(_uploaded_path(run_dir)))
        except (OSError, ValueError, TypeError):
            return None


def _meta_path(run_dir: Path) -> Path:
    return run_dir / "journal" / "meta.json"


def _uploaded_path(run_dir: Path) -> Path:
    return run_dir / "journal" / "uploaded.json"


def _read(path: Path) -> dict[str, Any]:
    body = json.loads(path.read_text())
    return {key: secrets.expand(v) if isinstance(v, str) else v for key, v in body.items()}


def _write(path: Path, body: dict[str, Any]) -> None:
    # A password in the URI is not written, only a reference to it.
    body = {key: secrets.reference(v) if isinstance(v, str) else v for key, v in body.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(body, indent=2) + "\n", sync=False)
