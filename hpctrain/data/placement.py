"""Where shards are read: in the folder of the data set, or in copies on this node.

mode   source on a disk of the node   on a network file system   a URL
none   in place                       in place                   refused
auto   in place                       staged where possible      staged
node   staged                         staged                     staged

>>> place = open_place("s3://bucket/digits", "auto", shards)
>>> place.plan(shards)                   # those of this node, in the order of use
>>> file = open(place.path(shards[0]), "rb")

`data.verify` (see `hpctrain.data.verify`) makes a place that checks what it gives.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.data.filesystem import kind_of
from hpctrain.data.index import Shard
from hpctrain.data.origin import is_url
from hpctrain.data.place import Folder, Place
from hpctrain.data.stage import Stage
from hpctrain.errors import ConfigError, StorageError

log = logging.getLogger(__name__)

MODES = ("none", "node", "auto")


def open_place(
    source: str | Path,
    mode: str,
    shards: Sequence[Shard],
    *,
    folder: Path | None = None,
    budget_bytes: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Place:
    """Choose where shards are read; see the module for the modes.

    The copies lie in `folder` or else in the first that is usable of SLURM_TMPDIR, TMPDIR, /tmp
    and /dev/shm.

    Args:
        source: Folder or URL of the data set.
        mode: none, node or auto.
        shards: What this node may need; the largest must fit.
        folder: For the copies: an existing folder of the node.
        budget_bytes: All staged files of this user on the node together. None: half of the free
            disk; in memory (/dev/shm, a tmpfs), whose use counts as the job's, a quarter of what
            the job may use.
        environ: Where the folders' names are looked up.

    Raises:
        ConfigError: The mode is unknown, or does not go with a URL.
        StorageError: Mode node, or a URL, and no folder is usable: each with the reason.
        DataError: A package for the URL is not installed.
    """
    if mode not in MODES:
        raise ConfigError(f"data.stage={mode}: it is one of {', '.join(MODES)}")
    if is_url(source):
        if mode == "none":
            raise ConfigError(
                f"data.stage=none: {source} cannot be read in place; use data.stage=auto, which "
                "copies its shards to the node"
            )
    elif mode == "none" or (mode == "auto" and kind_of(Path(source)) != "network"):
        return Folder(Path(source))
    largest = max((shard.bytes for shard in shards), default=0)
    problems = []
    for base in [folder] if folder else _bases(environ):
        try:
            return _open_stage(source, base, budget_bytes, largest)
        except StorageError as error:
            problems.append(str(error))
    problem = f"no folder of this node can hold staged shards: {'; '.join(problems)}"
    if mode == "node" or is_url(source):
        raise StorageError(f"{problem}. data.stage_dir names another")
    log.warning("%s. Shards are read from %s", problem, source)
    return Folder(Path(source))


def _open_stage(source: str | Path, base: Path, budget_bytes: int | None, largest: int) -> Stage:
    stage = Stage(source, base, budget_bytes=budget_bytes)
    if stage.budget_bytes < largest:
        budget = stage.budget_bytes
        stage.close()
        raise StorageError(
            f"{base} has room for {budget / 1e9:.3g} GB of staged shards, and the largest has "
            f"{largest / 1e9:.3g} GB"
        )
    return stage


def _bases(environ: Mapping[str, str]) -> Iterator[Path]:
    """The folders in question, the job's own first.

    Where Slurm makes the job a /tmp of its own (job_container/tmpfs), TMPDIR is often not set.
    """
    names = [environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp", "/dev/shm"]
    yield from map(Path, dict.fromkeys(name for name in names if name))
