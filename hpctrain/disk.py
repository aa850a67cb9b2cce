"""Atomic changes on disk: readers see all of a change or nothing, also after a crash."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]+)\.(?P<pid>\d+)$")
"""Matches the names that `temporary` makes."""


def temporary(path: Path) -> Path:
    """Return a name beside `path` for an unfinished file; a killed process leaves it behind."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def write_atomically(path: Path, text: str, sync: bool = True) -> None:
    """Replace the content of `path` at once; with `sync` this survives a crash of the machine."""
    unfinished = temporary(path)
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    unfinished.replace(path)


def create(path: Path, text: str, sync: bool = True) -> bool:
    """Create a file with its whole content, as `write_atomically` does, unless it exists.

    Returns:
        False if it exists, or if this file system has no hard links; nothing was written then.
    """
    unfinished = temporary(path)
    write_atomically(unfinished, text, sync)
    try:
        os.link(unfinished, path)
    except OSError:
        return False
    finally:
        unfinished.unlink()
    return True


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


def set_aside(path: Path) -> Path:
    """Rename `path` to `NAME.1`, or the first number that is free, and return the new path."""
    numbers = itertools.count(1)
    return path.rename(next(p for n in numbers if not (p := Path(f"{path}.{n}")).exists()))


LARGEST_JSON = 256 << 20  # bytes of a file about a run; a longer one is not ours


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. The folder may be a stranger's, and the name may be a trap.

    Raises:
        OSError: It cannot be opened, or it is a FIFO, a device or a folder. Opening a FIFO would
            otherwise wait until somebody writes into it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_json(path: Path) -> Any:
    """Return the content of a small JSON file, which may be a stranger's.

    Raises:
        OSError: It cannot be read (see `open_regular`).
        ValueError: It is not JSON, too long, or nested too deeply.
    """
    with open_regular(path) as file:
        content = file.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise ValueError(f"it is longer than {LARGEST_JSON >> 20} MiB")
    return parse_json(content)


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, or nested so deeply that Python's parser gives up.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def private_folder(path: Path) -> bool:
    """Make a folder that only this user can open, unless it exists.

    Returns:
        Whether it is a folder of this user in which nobody else can write.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
