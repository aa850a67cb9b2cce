"""The place where the files of shards are read: the folder of the data set, or copies on this node.

mode   source on a disk of the node   on a network file system   a URL
none   in place                       in place                   refused
auto   in place                       staged where possible      staged
node   staged                         staged                     staged

>>> place = open_place("s3://bucket/digits", "auto", shards)
>>> place.plan(shards)                   # the shards that this node reads, in the order of use
>>> file = open(place.path(shards[0]), "rb")
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.mounts import kind_of
from hpctrain.base.units import readable
from hpctrain.data.shards.index import FILE, Index, Shard, is_url

log = logging.getLogger(__name__)


class ShardPlace(Protocol):
    """Gives the file of a shard. Threads may share it. A forked child gets its own state."""

    def path(self, shard: Shard) -> Path:
        """Return the file to open. May wait until it exists. The file stays until `close`."""

    def plan(self, shards: Sequence[Shard]) -> None:
        """Announce the shards that are needed next, in this order, so that copying may start."""
        return

    def close(self) -> None:
        """Say that no shard is needed any more."""
        return


class Folder(ShardPlace):
    """The folder of the data set itself: nothing is copied, so nothing is to be done but `path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def path(self, shard: Shard) -> Path:
        """See `ShardPlace`."""
        return self.folder / shard.path


def load_index(source: str | Path) -> Index:
    """Return the index of a data set in a folder or at a URL.

    A process reads it again when the file has changed; one at a URL it reads once.
    """
    return _index(str(source), stamp(f"{source}/{FILE}"))


@lru_cache(maxsize=16)
def _index(source: str, stamp: object) -> Index:
    if not is_url(source):
        return Index.load(Path(source))
    from hpctrain.data.places.origin import index_at

    return index_at(source)


def stamp(path: str) -> object:
    """Return a value that changes when the file does, as a part of a cache key."""
    if is_url(path):
        return None
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def open_place(
    source: str | Path,
    mode: str,
    shards: Sequence[Shard],
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ShardPlace:
    """Choose where shards are read: the module explains the modes.

    The copies lie in `folder`, which is made if it does not exist. Without it, they lie in the
    first usable folder of SLURM_TMPDIR, TMPDIR, /tmp and /dev/shm. The largest of the shards, which
    are those that this node may need, must fit; all of them must, if they are at a URL.
    """
    if is_url(source):
        if mode == "none":
            raise ConfigError(
                f"data.stage=none: {source} cannot be read in place; use data.stage=auto, which "
                "copies its shards to the node"
            )
    elif mode == "none" or (mode == "auto" and kind_of(Path(source)) != "network"):
        return Folder(Path(source))
    return _staged(source, mode, shards, folder, environ)


def _staged(
    source: str | Path,
    mode: str,
    shards: Sequence[Shard],
    folder: Path | None,
    environ: Mapping[str, str],
) -> ShardPlace:
    """Return copies on this node, or the folder itself if there is no room and `mode` allows it."""
    needed = (sum if is_url(source) else max)([0, *(shard.bytes for shard in shards)])
    problems = []
    for base in [folder] if folder else _bases(environ):
        try:
            if base == folder:
                _make(base)
            return _open_stage(source, base, needed)
        except StorageError as error:
            problems.append(str(error))
    problem = f"no folder of this node can hold staged shards: {'; '.join(problems)}"
    if mode == "node" or is_url(source):
        raise StorageError(f"{problem}. data.stage_dir names another")
    log.warning("%s. Shards are read from %s", problem, source)
    return Folder(Path(source))


def _make(folder: Path) -> None:
    """Make the folder that `data.stage_dir` names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from None


def _open_stage(source: str | Path, base: Path, needed: int) -> ShardPlace:
    stage = offered.Stage(source, base)
    if stage.budget_bytes < needed:
        budget = stage.budget_bytes
        stage.close()
        what = "they have" if is_url(source) else "the largest has"
        raise StorageError(
            f"{base} has room for {readable(budget)} of staged shards, and {what} "
            f"{readable(needed)}"
        )
    opened: ShardPlace = stage
    return opened


def _bases(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the candidate folders, those of the job first."""
    names = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp", "/dev/shm"]
    yield from map(Path, dict.fromkeys(name for name in names if name))
