"""On which file system a path is, by the table of mounts of Linux."""

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["network", "memory", "disk"]

# The type of the mount, as the kernel names it. FUSE on a cluster is nearly always a network file
# system; a local disk behind FUSE is called `fuseblk`.
_NETWORK = re.compile(
    r"nfs\d?|lustre|gpfs|mmfs|beegfs\w*|fhgfs|ceph|cifs|smb\d?|smbfs|afs|9p|panfs|wekafs|pvfs2"
    r"|orangefs|ocfs2|gfs2|glusterfs|quobyte|virtiofs|dvs|datawarp|fuse(\..+)?"
)
_MEMORY = re.compile(r"tmpfs|ramfs")
# File systems of the node itself that use FUSE.
_LOCAL = re.compile(
    r"fuse\.(fuse-overlayfs|squashfuse\w*|lxcfs|encfs|gocryptfs|cryfs|mergerfs|bindfs)"
)
TABLE = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """Where a file system is mounted, its type, and the options with which it is."""

    point: str = ""
    type: str = ""
    options: frozenset[str] = frozenset()

    @property
    def kind(self) -> Kind:
        """What may be expected of it."""
        if _NETWORK.fullmatch(self.type) and not _LOCAL.fullmatch(self.type):
            return "network"
        return "memory" if _MEMORY.fullmatch(self.type) else "disk"


def mount_of(path: Path, table: Path = TABLE) -> Mount:
    """Return the mount of `path`, or of the nearest existing folder above it."""
    real, best = os.path.realpath(path), Mount()  # `resolve` raises for a loop of links
    for line in table.read_text(errors="surrogateescape").splitlines():
        before, after = (part.split(" ") for part in line.split(" - ", 1))
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):  # a later mount hides an earlier one
            options = before[5].split(",") + after[2].split(",")
            best = Mount(point, after[0], frozenset(options))
    return best


def kind_of(folder: Path, table: Path = TABLE) -> Kind:
    """Return the kind of file system of a folder."""
    return mount_of(folder, table).kind
