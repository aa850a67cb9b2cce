"""Limits the read speed of this machine's disk, through the control groups of the kernel.

A virtual machine's disk may be cached in its host's memory. Cold reads are then limited by memory
copies, and do not show whether reading ahead works.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/blkio")
LIMIT = "blkio.throttle.read_bps_device"


@contextmanager
def limited(folder: Path, bytes_s: int, pids: list[int]) -> Iterator[bool]:
    """Limit the bytes per second that the processes `pids` read from the disk of `folder`.

    Yields whether the limit could be set.
    """
    group = GROUPS / f"hpctrain-{os.getpid()}"
    device = _disk(folder)
    try:
        group.mkdir()
        (group / LIMIT).write_text(f"{device} {bytes_s}")
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        possible = True
    except OSError:  # not root, or control groups of version 2
        possible = False
    try:
        yield possible
    finally:
        with suppress(OSError):
            for pid in pids:
                (GROUPS / "cgroup.procs").write_text(str(pid))
            group.rmdir()


def _disk(folder: Path) -> str:
    """Return the whole disk of `folder` as "major:minor"; a partition cannot have a limit."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    with suppress(OSError):
        return (whole / "dev").read_text().strip()
    return f"{os.major(number)}:{os.minor(number)}"
