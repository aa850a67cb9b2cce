"""The bytecode of a copy of the code, so that the ranks of a job need not compile it.

    source.py, its __pycache__ ── is it that of the content? ── copy.py, its __pycache__

All ranks of a job import at the same time. Without bytecode each of them compiles the same hundreds
of modules, which takes a second, and writes the results into one folder of a shared file system.
Where Python has compiled a module before, that is taken along.
"""

from __future__ import annotations

import os
import struct
import sys
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<4sIII")  # PEP 552: magic number, flags, mtime and size of the source


class Source(NamedTuple):
    """The file that a module was read from, as it was then."""

    path: Path
    mtime: float  # its time of modification, in seconds
    size: int  # in bytes


def take_along(source: Source, copy: Path) -> None:
    """Write the bytecode of a module beside its copy, if Python has made it of this content."""
    if sys.pycache_prefix is not None:  # Python looks elsewhere
        return
    expected = MAGIC_NUMBER, 0, int(source.mtime) & 0xFFFFFFFF, source.size & 0xFFFFFFFF
    try:
        made = Path(cache_from_source(source.path)).read_bytes()
        if _HEADER.unpack_from(made) != expected:
            return
    except (OSError, struct.error):  # there is none, and Python compiles
        return
    cached = Path(cache_from_source(copy))
    if cached.exists():  # a file of the repository
        return
    facts = copy.stat()
    header = _HEADER.pack(*expected[:2], int(facts.st_mtime) & 0xFFFFFFFF, expected[3])
    cached.parent.mkdir(exist_ok=True)
    # Those who may read the copy may read its bytecode.
    opened = os.open(cached, os.O_WRONLY | os.O_CREAT | os.O_EXCL, facts.st_mode & 0o444)
    with open(opened, "wb") as file:
        file.write(header + made[_HEADER.size :])
