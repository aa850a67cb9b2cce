"""Changes on disk that are whole or not there, for readers and after a crash."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import socket
from pathlib import Path

TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]+)\.(?P<pid>\d+)$")
"""The names that `temporary` gives."""


def temporary(path: Path) -> Path:
    """Where this process makes what is to become `path`; if it is killed, that stays behind."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def write_atomically(path: Path, text: str, sync: bool = True) -> None:
    """Readers see the old content or the new, with `sync` also after a crash of the machine."""
    unfinished = temporary(path)
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    unfinished.replace(path)


def sync_file_system(folder: Path) -> None:
    """Have all that was written into this file system reach the disk, at one stroke."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> Path:
    """Rename to `NAME.1`, or the first number that is free; nothing has the old name then."""
    numbers = itertools.count(1)
    return path.rename(next(p for n in numbers if not (p := Path(f"{path}.{n}")).exists()))
