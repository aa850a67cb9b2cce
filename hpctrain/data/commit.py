"""How a data set appears in a folder at once, and what a writer that was killed leaves.

OUT/.hpctrain-partial/        shards that are being written
OUT/.hpctrain-partial/commit.json and index.json: from here on the new data set is whole,
and only moved: who was killed meanwhile goes on (`resume`)
OUT/*.h5, then OUT/index.json
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpctrain.data import index as index_file
from hpctrain.data.index import Index
from hpctrain.errors import DataError, StorageError

PARTIAL = ".hpctrain-partial"
MOVES = "commit.json"  # in PARTIAL: {shard in the index: where it lies in PARTIAL}
REPLACED = "replaced"  # in PARTIAL: the index of the data set that gives way


def commit(folder: Path, index: Index, moves: Mapping[str, str]) -> None:
    """Move shards from PARTIAL into `folder`, the index last, and remove PARTIAL.

    Args:
        folder: A data set that is there is replaced.
        index: Of the new one.
        moves: For each of its shards, and of the files beside them, its path in PARTIAL.

    Raises:
        StorageError: The folder cannot be written; it may be resumed.
    """
    partial = folder / PARTIAL
    try:
        index.save(partial)
        _write(partial / MOVES, json.dumps(dict(moves)))
        resume(folder)
    except OSError as error:
        raise storage_error(folder, error) from None


def resume(folder: Path) -> bool:
    """Finish the commit that was begun in `folder`, if there is one; return whether.

    Raises:
        OSError: The folder cannot be written.
    """
    partial = folder / PARTIAL
    try:
        moves = json.loads((partial / MOVES).read_bytes())
    except FileNotFoundError:
        return False
    new = partial / index_file.FILE
    if new.exists():
        replaced = partial / REPLACED
        if (folder / index_file.FILE).exists():  # until the new one is there, there is none
            replaced.mkdir(exist_ok=True)
            os.replace(folder / index_file.FILE, replaced / index_file.FILE)
        for name, place in moves.items():
            if (partial / place).exists():
                os.replace(partial / place, folder / name)
        _sync(folder)
        for name in _listed(replaced) - set(moves):
            (folder / name).unlink(missing_ok=True)
        os.replace(new, folder / index_file.FILE)
        _sync(folder)
    shutil.rmtree(partial)
    return True


def clear_leftovers(folder: Path) -> None:
    """Remove what an interrupted writer left, and finish what it had begun to move.

    Raises:
        OSError: The folder cannot be written.
    """
    if not resume(folder) and (folder / PARTIAL).exists():
        shutil.rmtree(folder / PARTIAL)


def lock(folder: Path, *, shared: bool = False) -> int | None:
    """Hold `folder` against other writers, while the descriptor is open.

    Args:
        folder: Exists.
        shared: With others that share.

    Returns:
        The descriptor; None where the file system has no locks.

    Raises:
        StorageError: Another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StorageError(f"another process is writing a data set into {folder}") from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def storage_error(path: Path, error: OSError) -> StorageError:
    """What to tell of a file or folder that cannot be written."""
    return StorageError(f"cannot write {path}: {error.strerror or error}")


def _listed(folder: Path) -> set[str]:
    """The shards and files that the index in `folder` lists; none without a readable index."""
    try:
        index = Index.load(folder)
    except DataError:
        return set()
    beside = {name for name in index.provenance.get("beside", {}) if "/" not in name}
    return {shard.path for shard in index.shards} | beside


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _sync(folder: Path) -> None:
    """Force a folder's renames to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
