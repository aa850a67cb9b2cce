"""How a data set appears in a folder at once, and what a writer that was killed leaves.

OUT/.hpctrain-partial/        shards that are being written
OUT/.hpctrain-partial/lock    held by who writes; a file, as network file systems lock no folders
OUT/.hpctrain-partial/commit.json and index.json: from here on the new data set is whole,
and only moved: who was killed meanwhile goes on (`resume`)
OUT/*.h5, then OUT/index.json
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.data import index as index_file
from hpctrain.data.index import Index
from hpctrain.errors import DataError, StorageError

PARTIAL = ".hpctrain-partial"
LOCK = "lock"  # in PARTIAL
MOVES = "commit.json"  # in PARTIAL: {shard in the index: where it lies in PARTIAL}
REPLACED = "replaced"  # in PARTIAL: the index of the data set that gives way


def check_ours(folder: Path) -> None:
    """See that a data set in `folder` may be replaced: that it is made of shards of ours.

    Raises:
        DataError: It is made of files that others wrote (`python -m data_prep index`), which
            would be lost with it.
    """
    try:
        index = Index.load(folder)
    except DataError:
        return  # there is none, or nobody knows which files are its
    source = index.provenance.get("source")
    adopted = isinstance(source, Mapping) and source.get("name") == "index"
    for shard in index.shards:
        ours = re.fullmatch(rf"{re.escape(shard.split)}-\d{{5,}}\.h5", shard.path)
        if adopted or index.version > 1 or not ours:
            raise DataError(
                f"the data set in {folder} is made of files that others wrote, such as "
                f"{shard.path}, which are never replaced: give another folder, or remove "
                f"{index_file.FILE} and move them"
            )


def commit(folder: Path, index: Index, moves: Mapping[str, str]) -> None:
    """Move shards from PARTIAL into `folder`, the index last, and remove PARTIAL.

    Args:
        folder: A data set that is there is replaced.
        index: Of the new one.
        moves: For each of its shards, and of the files beside them, its path in PARTIAL.

    Raises:
        DataError: The data set that is there is not ours; see `check_ours`.
        StorageError: The folder cannot be written; it may be resumed.
    """
    partial = folder / PARTIAL
    check_ours(folder)
    try:
        index.save(partial)
        sync(partial)  # MOVES without the index would mean that it was moved already
        _write(partial / MOVES, json.dumps(dict(moves)))
        sync(partial)
        discard(folder)
    except OSError as error:
        raise storage_error(folder, error) from None


def resume(folder: Path) -> bool:
    """Finish the commit that was begun in `folder`, if there is one; return whether.

    Raises:
        DataError: It cannot be read.
        OSError: The folder cannot be written.
    """
    partial = folder / PARTIAL
    try:
        moves = dict(json.loads((partial / MOVES).read_bytes()))
    except FileNotFoundError:
        return False
    except (ValueError, TypeError):
        raise DataError(
            f"{partial / MOVES} is damaged: what was to be moved into {folder} is not known; "
            f"remove {partial} to begin anew"
        ) from None
    new = partial / index_file.FILE
    if new.exists():
        replaced = partial / REPLACED
        if (folder / index_file.FILE).exists():  # until the new one is there, there is none
            replaced.mkdir(exist_ok=True)
            os.replace(folder / index_file.FILE, replaced / index_file.FILE)
        for name, place in moves.items():
            if (partial / place).exists():
                os.replace(partial / place, folder / name)
        sync(folder)
        for name in _listed(replaced) - set(moves):
            (folder / name).unlink(missing_ok=True)
        os.replace(new, folder / index_file.FILE)
        sync(folder)
    _empty(partial)
    return True


def clear_leftovers(folder: Path) -> None:
    """Finish what an interrupted writer had begun to move, and remove what else it left.

    The lock stays.

    Raises:
        OSError: The folder cannot be written.
    """
    if not resume(folder):
        _empty(folder / PARTIAL)


def discard(folder: Path) -> None:
    """The last act of who holds the lock alone: `clear_leftovers`, and PARTIAL is gone.

    Raises:
        OSError: The folder cannot be written.
    """
    clear_leftovers(folder)
    (folder / PARTIAL / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # the next writer is there already
        (folder / PARTIAL).rmdir()


def settle(folder: Path, *, wait: float = 0) -> None:
    """Finish the commit of a writer that was killed, if there is one.

    Args:
        folder: May not exist.
        wait: See `lock`.

    Raises:
        StorageError: The folder cannot be written, or another process holds it.
    """
    try:
        names = set(os.listdir(folder / PARTIAL))
    except OSError:
        return
    if MOVES not in names and not names <= {LOCK}:
        return
    try:
        descriptor = lock(folder, wait=wait)
        try:
            if set(os.listdir(folder / PARTIAL)) <= {LOCK} or resume(folder):
                discard(folder)
        finally:
            unlock(descriptor)
    except StorageError:
        if MOVES in names:
            raise  # otherwise it has only just begun
    except OSError as error:
        raise storage_error(folder, error) from None


def lock(folder: Path, *, shared: bool = False, wait: float = 0) -> int | None:
    """Hold `folder` against other writers, while the descriptor is open; PARTIAL exists then.

    Args:
        folder: Exists.
        shared: With others that share.
        wait: So many seconds for another process to end.

    Returns:
        The descriptor; None where the file system has no locks.

    Raises:
        OSError: The folder cannot be written.
        StorageError: Another process holds it.
    """
    path, end = folder / PARTIAL / LOCK, time.monotonic() + wait
    while True:
        path.parent.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # who had finished has just removed it
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if holds(folder, descriptor):
                return descriptor
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= end:
                raise StorageError(f"another process is writing a data set into {folder}") from None
            time.sleep(0.1)
        except OSError:
            os.close(descriptor)
            return None


def alone(folder: Path, descriptor: int | None) -> bool:
    """Make a shared lock one's own, if nobody else has it; otherwise it is lost."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return holds(folder, descriptor)


def holds(folder: Path, descriptor: int) -> bool:
    """Whether the lock is still that of the folder: who finishes removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / PARTIAL / LOCK))
    except FileNotFoundError:
        return False


def unlock(descriptor: int | None) -> None:
    """Let other writers in."""
    if descriptor is not None:
        os.close(descriptor)


def storage_error(path: Path, error: OSError) -> StorageError:
    """What to tell of a file or folder that cannot be written."""
    # HDF5 tells where in its code it failed; somewhere in there is what the system said.
    system = re.search(r"error message = '([^']+)'", str(error))
    why = error.strerror or (system[1] if system else str(error))
    return StorageError(f"cannot write {path}: {why}")


def _empty(partial: Path) -> None:
    """Remove all but the lock; MOVES last, so that who is killed here is understood."""
    for path in [*partial.iterdir()] if partial.exists() else []:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (LOCK, MOVES):
            path.unlink()
    (partial / MOVES).unlink(missing_ok=True)


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


def sync(path: Path) -> None:
    """Force a file to the disk, or a folder's renames."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
