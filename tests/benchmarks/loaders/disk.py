"""A disk of a known speed: the kernel's own limit on this machine's, where we may set it.

A virtual machine's disk may be its host's memory, and as fast: then a cold read is bound by the
copies, and says nothing of reading ahead.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")
LIMIT = "blkio.throttle.read_bps_device"


@contextmanager
def limited(folder: Path, bytes_s: int, pids: list[int]) -> Iterator[bool]:
    """Limit what these processes read from the disk of `folder`; whether that was possible."""
    group = GROUPS / f"hpctrain-{os.getpid()}"
    device = _disk(folder)
    try:
        group.mkdir()
        (group / LIMIT).write_text(f"{device} {bytes_s}")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        possible = True
    except OSError:  # not root, or the other version of control groups
        possible = False
    try:
        yield possible
    finally:
        with suppress(OSError):
            for pid in pids:
                (GROUPS / "cgroup.procs").write_text(str(pid))
            group.rmdir()


def _disk(folder: Path) -> str:
    """The device, "major:minor"; of a partition its whole disk, which is what has limits."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    with suppress(OSError):
        return (whole / "dev").read_text().strip()
    return f"{os.major(number)}:{os.minor(number)}"
