"""Atomic changes on disk: readers see all of a change or nothing, also after a crash."""

import ctypes
import errno
import itertools
import json
import os
import pwd
import re
import resource
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.base.errors import ConfigError

_PROBE = 2**20  # bytes

TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]+)\.(?P<pid>\d+)(-[0-9a-f]{16})?$")
"""Matches the names that `temporary` makes. Files of before have no random part at the end."""


def temporary(path: Path) -> Path:
    """Return a name beside `path` for an unfinished file; a killed process leaves it behind.

    Nobody can guess the name and put a link there first. Each call returns another one.
    """
    unique = f"{os.getpid()}-{secrets.token_hex(8)}"
    return path.with_name(f".{path.name}.{socket.gethostname().partition('.')[0]}.{unique}")


def write_atomically(path: Path, text: str, sync: bool = True, mode: int = 0o666) -> None:
    """Replace the content of `path` at once; with `sync` this survives a crash of the machine."""
    unfinished = temporary(path)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # no link
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        unfinished.replace(path)
        if sync:
            _sync_names(path.parent)
    except OSError:
        with suppress(OSError):  # a disk that can only be read
            unfinished.unlink(missing_ok=True)
        raise


def create(path: Path, text: str, sync: bool = True) -> bool:
    """Create a file with its whole content, as `write_atomically` does, unless it exists.

    Return False if it exists, or if this file system has no hard links; then nothing was written.
    """
    unfinished = temporary(path)
    write_atomically(unfinished, text, sync)
    try:
        os.link(unfinished, path)
    except OSError:
        return False
    finally:
        unfinished.unlink()
    if sync:
        _sync_names(path.parent)
    return True


def _sync_names(folder: Path) -> None:
    try:
        sync(folder)
    except OSError as error:  # not every file system can, and a folder may not be readable
        if error.errno not in (errno.EINVAL, errno.EACCES):
            raise


def sync(path: Path) -> None:
    """Force a file, or the renames in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(folder: Path) -> None:
    """Wait until everything that was written into this file system is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def why_unwritten(folder: Path) -> str:
    """Return why a write into a folder has failed, for libraries that do not say; "" if unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    for path in sorted(folder.rglob("*")) if limit != resource.RLIM_INFINITY else ():
        if path.is_file() and path.stat().st_size >= limit:
            return f"{path.name} has the most bytes that a file may have, {limit:,} (ulimit -f)"
    probe = temporary(folder / "probe")
    try:
        with probe.open("xb") as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        facts = os.statvfs(folder)
        free = facts.f_bavail * facts.f_frsize
        return f"{error.strerror}; its file system has {free:,} bytes free"
    finally:
        probe.unlink(missing_ok=True)
    return ""


def set_aside(path: Path) -> Path:
    """Rename `path` to `NAME.1`, or the first number that is free, and return the new path."""
    numbers = itertools.count(1)
    return path.rename(next(p for n in numbers if not (p := Path(f"{path}.{n}")).exists()))


LARGEST_JSON = 256 << 20  # bytes of a file about a run; a longer one is not ours


def open_below(path: Path, flags: int, parts: int = 1, mode: int = 0o666) -> int:
    """Open a file of a run directory or data set, which may be a stranger's, as `os.open` does.

    So many `parts` of the path, the last ones, lie below the run directory or data set. None of
    them may be a link (ELOOP): whoever may write there could lead us to any file of ours. It is 0
    if the user has named the file.
    """
    flags |= os.O_CLOEXEC | (os.O_NOFOLLOW if parts else 0)
    if parts < 2:
        with _named(path):
            return os.open(path, flags, mode)
    *folders, name = path.parts[-parts:]
    inside = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parents[parts - 1], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _named(path):
            for each in folders:
                if stat.S_ISLNK(os.stat(each, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, "")
                outer, folder = folder, os.open(each, inside, dir_fd=folder)
                os.close(outer)
            return os.open(name, flags, mode, dir_fd=folder)
    finally:
        os.close(folder)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = "it is a link, or lies behind one" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, why, str(path)) from None


def open_regular(path: Path, parts: int = 1) -> BinaryIO:
    """Open a file for reading. The folder may be a stranger's, and the name may be a trap.

    `os.fstat` of the file tells its owner, and `parts` are those of `open_below`. A link, a device,
    a folder or a FIFO, for whose writer one would wait, is an OSError.
    """
    descriptor = open_below(path, os.O_RDONLY | os.O_NONBLOCK, parts)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def text_of(path: Path, parts: int = 1, errors: str = "replace") -> str:
    """Return the text of a file, at most LARGEST_JSON; "" if there is none (see `open_regular`)."""
    with suppress(OSError), open_regular(path, parts) as file:
        return file.read(LARGEST_JSON).decode(errors=errors)
    return ""


def opener(parts: int) -> Callable[[str, int], int]:
    """Return the `opener` with which `open` follows no link in the last parts of a path."""
    return lambda path, flags: open_below(Path(path), flags, parts)


def is_own(path: Path) -> bool:
    """Return whether this user owns a file or folder; a link is not followed."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def owner_name(path: Path) -> str:
    """Return the name of the user who owns a file or folder; "" if there is none."""
    try:
        uid = path.lstat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; it is a ValueError, too, if it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def expanded(path: str, key: str) -> str:
    """Return the path, which `key` names, with the home of a user in place of `~`.

    It is a ConfigError if that home is not known, as in a container whose user has no entry in
    passwd.
    """
    found = os.path.expanduser(path)
    if found.startswith("~") and not os.path.lexists(found):
        raise ConfigError(
            f"{key}={path}: the home folder {found.partition('/')[0]} is not known here (HOME is "
            f"{os.environ.get('HOME', 'not set')}, and passwd has no such entry): set HOME, or "
            "give the whole path"
        )
    return found


def give_home(env: MutableMapping[str, str]) -> None:
    """Set HOME if this user has none: MLflow and other libraries end without it.

    The folder is the one that container runtimes give to a user without an entry in passwd.
    """
    if os.path.expanduser("~") == "~":
        env["HOME"] = "/"


def private_folder(path: Path) -> bool:
    """Make a folder that only this user can open, unless it exists.

    Return whether it is a folder of this user in which nobody else can write.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def umask() -> int:
    """Return the umask of HPCTRAIN_UMASK; by default only the user can read what is written."""
    text = os.environ.get("HPCTRAIN_UMASK", "077")
    if not re.fullmatch(r"0?0[0-7]{2}", text):
        raise ConfigError(
            f"HPCTRAIN_UMASK={text}: an octal number which leaves the owner all rights, such as "
            "077 (private, the default) or 027 (the group may read)"
        )
    return int(text, 8)


@contextmanager
def private_files() -> Iterator[None]:
    """Write files with the umask of the command line (HPCTRAIN_UMASK)."""
    before = os.umask(umask())
    try:
        yield
    finally:
        os.umask(before)
