"""A file of a code snapshot, and the bytecode of a module, so that ranks need not compile it.

    source.py, its __pycache__ ── is it that of the content? ── copy.py, its __pycache__

All ranks of a job import at the same time. Without bytecode each of them compiles the same hundreds
of modules, which takes a second, and writes the results into one folder of a shared file system.
Where Python has compiled a module before, that is taken along.
"""

import os
import stat
import struct
import sys
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<4sIII")  # PEP 552: magic number, flags, mtime and size of the source


class Source(NamedTuple):
    """The file that a module was read from, as it was then."""

    path: Path
    mtime: float  # its time of modification, in seconds
    size: int  # in bytes


@dataclass(frozen=True)
class CopiedFile:
    """A file of a code snapshot, in memory."""

    content: bytes  # of a link: its target
    mode: int  # type of a link; of a file, whether it is executable
    readers: int = 0o044  # who may read the file besides its owner: group and others
    module: Source | None = None  # what a Python file was read from

    @property
    def permissions(self) -> int:
        """The permissions of a copy."""
        executable = self.mode & stat.S_IXUSR
        return 0o400 | self.readers | (executable | self.readers >> 2 if executable else 0)

    @property
    def identity(self) -> str:
        """What the digest knows of the mode. Files that everybody may read have a short one."""
        return str(self.mode) if self.readers == 0o044 else f"{self.mode}:{self.readers:o}"

    def write(self, path: Path) -> None:
        """Write the copy, with no permission that its file does not have."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(self.mode):
            path.symlink_to(os.fsdecode(self.content))
            return
        # Others must not read it meanwhile. The umask takes away more.
        opened = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.permissions | stat.S_IWUSR
        )
        with open(opened, "wb") as file:
            file.write(self.content)
        # Read-only, because other runs use the file too.
        path.chmod(path.stat().st_mode & 0o555)
        if self.module is not None:
            _take_along(self.module, path)


def _take_along(source: Source, copy: Path) -> None:
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
