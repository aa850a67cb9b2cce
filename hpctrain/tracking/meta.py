"""The two small files beside the journal: where it is to go, and how far it has got.

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
    """Where a journal goes."""

    uri: str
    """The MLflow store, resolved: an absolute sqlite path, or a server."""
    experiment: str
    run_name: str
    uid: str
    """Our own name of the run, a tag in MLflow, which does not let us choose its run id."""
    parent_uid: str | None = None
    """The sweep that the run belongs to."""
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
    """How far a journal has been carried. The truth is the store's own cursor; this is a copy."""

    uri: str
    uid: str
    experiment_id: str
    run_id: str
    offset: int

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
    """A store's password stays outside."""
    body = {key: secrets.reference(v) if isinstance(v, str) else v for key, v in body.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(body, indent=2) + "\n", sync=False)
