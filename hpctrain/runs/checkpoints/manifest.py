"""The manifest of a checkpoint: what it holds, and the size and digest of every file.

    checkpoints/step-00000200/manifest.json
    {"version": 1, "step": 200, "time": 1.7e9, "world_size": 4, "layout": {"dp_shard": 4},
     "progress": {"step": 200, "data": {"consumed": 12800}, …},
     "files": {"__0_0.distcp": {"bytes": 51343, "xxh3_128": "…"}, …},
     "digest": "xxh3_128:…"}

The digest covers every byte before it, and the bytes after it are known, so a flipped bit is seen
wherever it is.

This module does not import torch, because commands on a login node read manifests, too.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import msgspec
import xxhash

from hpctrain.base.errors import DamageError, StorageError
from hpctrain.base.files.disk import LARGEST_JSON, open_regular, sync
from hpctrain.base.files.record import Count, Record, Time, convert, decode
from hpctrain.base.names.step_names import of_steps

log = logging.getLogger(__name__)

NAME = "manifest.json"
OLD = ".old"  # what a checkpoint is called while another one of its step takes its place
VERSION = 1
_NOT_HEALTHY = "its parameters or buffers are not finite"
Progress = dict[str, Any]
NONE_INTACT = (
    "%s: no checkpoint is intact and healthy; see the warnings above (if none can be brought back, "
    "remove them: train.from_scratch=true then starts at step 0)"
)
PASSED_OVER = "%s is not intact (%s); trying the one before"
_DIGEST = b',\n "digest": "xxh3_128:%s"\n}\n'


class _Version(Record, frozen=True):
    version: int


class _Used(Record, frozen=True):
    """What commands take of the progress in a manifest."""

    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    tracker: Count = 0


class _FileFacts(TypedDict):
    """The size and the digest of a file."""

    bytes: Count
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest: a record of a file, and what is written into one.

    Attributes:
        step: Global step.
        world_size: The number of ranks that have saved it.
        progress: Everything else that the run needs to continue.
        files: Size and digest of each file, by name: `bytes` and `xxh3_128`.
        time: When it was saved, in seconds since the epoch.
        layout: The degrees of parallelism, without those that are 1.
        healthy: Whether all its parameters are finite.
        base: The digest of the weights that its adapters belong to, which it does not hold; "" if
            it holds the whole model.
    """

    VERSION: ClassVar[int] = VERSION

    step: Count
    world_size: Count
    progress: Progress
    files: Mapping[str, _FileFacts]
    time: Time
    layout: Mapping[str, Count]
    healthy: bool = True
    base: str = ""

    def __post_init__(self) -> None:
        """Check the names of the files; raise a ValueError if one lies elsewhere."""
        if outside := [name for name in self.files if Path(name).name != name]:
            raise ValueError(f"{outside[0]} is not a file of this checkpoint")

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric when it was saved."""
        return dict(self.progress.get("metrics", {}))

    def write(self, checkpoint: Path) -> None:
        """Write and sync the manifest in the folder of a checkpoint."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        path = checkpoint / NAME
        path.write_bytes(_sealed(text.removesuffix("\n}").encode()))
        sync(path)

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read the manifest in a checkpoint; raise a StorageError if it is missing or damaged."""
        path = checkpoint / NAME
        try:
            with open_regular(path) as file:
                content = file.read(LARGEST_JSON)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read ({error.strerror})") from error
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Manifest:
        """Return the manifest with this content; the path is for errors."""
        version = decode(_Version, content, path).version
        if version != VERSION:
            raise DamageError(path, f"found version {version}, this hpctrain reads {VERSION}")
        if content != _sealed(content.rpartition(_DIGEST.partition(b"%s")[0])[0]):
            raise DamageError(path, "it does not fit its digest")
        found = decode(Manifest, content, path)
        used = {key: found.progress.get(key) for key in ("metrics", "tracker")}
        convert(_Used, {key: each for key, each in used.items() if each is not None}, path)
        return found

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(facts["bytes"] for facts in self.files.values())


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of the committed checkpoints in a run's `folder`, the newest first."""
    return of_steps(folder)[::-1]


def put_back(folder: Path) -> None:
    """Finish what a process has left that was killed while it replaced a checkpoint."""
    for old in of_steps(folder, OLD):
        if old.with_suffix("").exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(old.with_suffix(""))


def _is_healthy(checkpoint: Path) -> bool:
    """Return False if the manifest of a checkpoint says that not all parameters are finite."""
    try:
        return Manifest.read(checkpoint).healthy
    except StorageError:
        return True  # nothing is known; `damage` says what is wrong


def newest_healthy(
    folder: Path, is_damaged: Callable[[Path], bool] = lambda _: False
) -> Path | None:
    """Return the newest healthy checkpoint but those that are known to be damaged, or None."""
    found = (path for path in checkpoints(folder) if not is_damaged(path))
    return next(filter(_is_healthy, found), None)


def newest_intact(folder: Path) -> Path | None:
    """Return the newest checkpoint that is intact and healthy; None if there are no checkpoints."""
    for path in healthy(folder):
        if not (problem := damage(path)):
            return path
        log.warning(PASSED_OVER, path, problem)
    if checkpoints(folder):
        raise StorageError(NONE_INTACT % folder)
    return None


def healthy(folder: Path) -> Iterator[Path]:
    """Yield the healthy checkpoints, the newest first, and say which are not."""
    for path in checkpoints(folder):
        if _is_healthy(path):
            yield path
        else:
            log.warning("%s is not healthy (%s); trying the one before", path, _NOT_HEALTHY)


def damage(checkpoint: Path, part: int = 0, parts: int = 1, *, digests: bool = True) -> str:
    """Return what is wrong with the files of a checkpoint, with the name of one; "" if nothing.

    Only every file whose place is `part` modulo `parts` is looked at: a rank gets its own ones.
    Without `digests` only their sizes are compared.
    """
    try:
        files = Manifest.read(checkpoint).files
        names = sorted(files, key=lambda name: (name.startswith("."), len(name), name))
        for name, facts in ((name, files[name]) for name in names[part::parts]):
            if (size := (checkpoint / name).stat().st_size) != facts["bytes"]:
                return f"{name} has {size} bytes instead of {facts['bytes']}"
            if digests and digest(checkpoint / name) != facts["xxh3_128"]:
                return f"the content of {name} has changed"
    except StorageError as error:
        return str(error).removeprefix(f"{checkpoint}/")
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}"
    return ""


def digest(path: Path) -> str:
    """Return the xxh3_128 digest of a file."""
    hashed = xxhash.xxh3_128()
    with open_regular(path, parts=0) as file:  # a FIFO would be waited for
        while block := file.read(1 << 22):
            hashed.update(block)
    return hashed.hexdigest()


def _sealed(body: bytes) -> bytes:
    """Return the content of a manifest: the JSON object up to its digest, and the digest."""
    return body + _DIGEST.replace(b"%s", xxhash.xxh3_128_hexdigest(body).encode())
