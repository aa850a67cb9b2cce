"""How a data set appears in a folder all at once, and how the work of a killed writer is finished.

OUT/.hpctrain-partial/        shards that are being written
OUT/.hpctrain-partial/lock    the writer holds it; a file, as network file systems lock no folders
OUT/.hpctrain-partial/commit.json and index.json: when both are there, the new data set is whole
and only has to be moved; after a kill `resume` goes on with that
OUT/*.h5, then OUT/index.json
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from hpctrain.base.errors import DamageError, DataError, StorageError
from hpctrain.base.files.disk import open_below, sync, write_atomically
from hpctrain.base.files.record import decode, matching, read_bytes
from hpctrain.data.shards import index as index_file
from hpctrain.data.shards.index import Index

PARTIAL = ".hpctrain-partial"
# These names are in the folder PARTIAL.
LOCK = "lock"
_MOVES = "commit.json"
_REPLACED = "replaced"  # the folder that keeps the index of the data set that is replaced

_NAME = r"(?!\.{1,2}(?:/|\Z))[^/]+"
_Inside = Annotated[str, matching(f"{_NAME}(/{_NAME})*", "a path that stays in the folder")]
_Moves = dict[_Inside, _Inside]
"""The content of _MOVES: the path of a shard in the index, and its path in PARTIAL."""


def check_ours(folder: Path) -> None:
    """Raise a DataError if a data set in `folder` has files that others wrote: never replaced."""
    try:
        index = Index.load(folder)
    except DataError:
        return  # there is no data set, or its files are not known
    adopted = index.told("source").get("name") == "index"
    adopted = adopted or any(spec.elsewhere for spec in index.fields.values())
    for shard in index.shards:
        ours = re.fullmatch(rf"{re.escape(shard.split)}-\d{{5,}}\.h5", shard.path)
        if adopted or not ours:
            raise DataError(
                f"the data set in {folder} is made of files that others wrote, such as "
                f"{shard.path}, which are never replaced: give another folder, or remove "
                f"{index_file.FILE} and move them"
            )


def commit(folder: Path, index: Index, moves: Mapping[str, str]) -> None:
    """Move shards from PARTIAL into `folder`, the index last, and remove PARTIAL.

    `moves` has the path in PARTIAL of each shard, and of each file beside the shards. After a
    StorageError, `resume` may finish the commit later.
    """
    partial = folder / PARTIAL
    check_ours(folder)
    with writable(folder):
        index.save(partial)
        sync(partial)  # _MOVES without the index means that the index has been moved
        write_atomically(partial / _MOVES, json.dumps(dict(moves)))
        sync(partial)
        discard(folder)


def resume(folder: Path) -> bool:
    """Finish the commit that was begun in `folder`; return whether there was one."""
    partial = folder / PARTIAL
    try:
        content, _ = read_bytes(partial / _MOVES, 2, index_file.LARGEST)
        # Names of files may be any bytes.
        moves = decode(_Moves, content, partial / _MOVES, surrogates=True)
    except FileNotFoundError:
        return False
    except DamageError as error:
        raise DataError(
            f"{partial / _MOVES} is damaged: what was to be moved into {folder} is not known; "
            f"remove {partial} to begin anew ({error})"
        ) from None
    new = partial / index_file.FILE
    if new.exists():
        replaced = partial / _REPLACED
        if (folder / index_file.FILE).exists():  # until the new index is there, the folder has none
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
    """Finish the commit of an interrupted writer, and remove its other files but the lock."""
    if not resume(folder):
        _empty(folder / PARTIAL)


def discard(folder: Path) -> None:
    """Call `clear_leftovers`, and remove PARTIAL; the caller holds the exclusive lock."""
    clear_leftovers(folder)
    (folder / PARTIAL / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # the next writer has put its lock there
        (folder / PARTIAL).rmdir()


def settle(folder: Path, *, wait: float = 0) -> None:
    """Finish the commit of a writer that was killed, if there is one; the folder need not exist."""
    try:
        names = set(os.listdir(folder / PARTIAL))
    except OSError:
        return
    if _MOVES not in names and not names <= {LOCK}:
        return
    with writable(folder):
        try:
            descriptor = lock(folder, wait=wait)
        except StorageError:
            if _MOVES in names:
                raise
            return  # the other process has only just begun
        try:
            if set(os.listdir(folder / PARTIAL)) <= {LOCK} or resume(folder):
                discard(folder)
        finally:
            unlock(descriptor)


def lock(folder: Path, *, shared: bool = False, wait: float = 0) -> int | None:
    """Lock `folder` against other writers while the descriptor is open, and make PARTIAL.

    Return the descriptor; None where the file system has no locks. With `shared`, others may share
    the lock. Others are waited for, for at most `wait` seconds.
    """
    path, end = folder / PARTIAL / LOCK, time.monotonic() + wait
    while True:
        path.parent.mkdir(exist_ok=True)
        try:
            # No link: what lies in PARTIAL is removed later, by whoever holds the lock.
            descriptor = open_below(path, os.O_RDWR | os.O_CREAT, 2)
        except FileNotFoundError:
            continue  # the process before has just removed PARTIAL
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
    """Make a shared lock exclusive, if no other process holds it; otherwise the lock is lost."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return holds(folder, descriptor)


def holds(folder: Path, descriptor: int) -> bool:
    """Return whether the lock file is still in the folder: a writer that ends removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder / PARTIAL / LOCK))
    except FileNotFoundError:
        return False


def unlock(descriptor: int | None) -> None:
    """Let other writers in."""
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the system's errors into one that names the file or folder that cannot be written."""
    try:
        yield
    except OSError as error:
        # A message of HDF5 is a trace of its code; the system's message is somewhere in it.
        system = re.search(r"error message = '([^']+)'", str(error))
        why = error.strerror or (system[1] if system else str(error))
        raise StorageError(f"cannot write {path}: {why}") from None


def _empty(partial: Path) -> None:
    """Remove all but the lock; _MOVES last, so that after a kill here `resume` can go on."""
    for path in [*partial.iterdir()] if partial.exists() else []:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (LOCK, _MOVES):
            path.unlink()
    (partial / _MOVES).unlink(missing_ok=True)


def _listed(folder: Path) -> set[str]:
    """Return the shards and files that the index in `folder` lists; none if it cannot be read."""
    try:
        index = Index.load(folder)
    except DataError:
        return set()
    beside = {name for name in index.told("beside") if "/" not in name}
    return {shard.path for shard in index.shards} | beside
