"""Faults of the hardware in the log of the kernel, which on most systems only root may read.

NVIDIA's driver reports faults as `NVRM: Xid (PCI:0000:17:00): 79, ...`. Many numbers are errors of
programs; those here are faults of a GPU or of its links
(https://docs.nvidia.com/deploy/xid-errors/).
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.doctor.finding import Finding, good, unknown

_LOG = Path("/dev/kmsg")
_CHECK, _DAY_S, _RECORD = "kernel log", 86_400.0, 8192
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_FAULTS = {
    48: "memory error that could not be corrected",
    64: "memory that could not be repaired",
    74: "NVLink",
    79: "fallen off the bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's own processor hangs",
    120: "the GPU's own processor failed",
}
_HARDWARE = re.compile(r"\[Hardware Error\].*(Uncorrected|Fatal)", re.IGNORECASE)


def checked(log: Path = _LOG) -> Finding:
    """Look for faults of the last 24 hours; the log is since the last start of the node."""
    try:
        records = [*_records(log)]
    except PermissionError:
        return unknown(_CHECK, "only root may read it here: the driver's faults (Xid) are not seen")
    except OSError as error:
        return unknown(_CHECK, f"{log}: {error.strerror}: the driver's faults (Xid) are not seen")
    found: dict[str, float] = {}
    for seconds, text in records:
        ago = time.clock_gettime(time.CLOCK_MONOTONIC) - seconds
        if ago > _DAY_S:
            continue
        xid = _XID.search(text)
        if xid and int(xid[2]) in _FAULTS:
            found[f"Xid {xid[2]} of GPU {xid[1]} ({_FAULTS[int(xid[2])]})"] = ago
        elif _HARDWARE.search(text):
            found["an error of processor or memory that could not be corrected"] = ago
    if not found:
        return good(_CHECK, "no fault of the hardware within 24 hours")
    return Finding(
        _CHECK,
        "warn",
        "; ".join(f"{what}, {ago / 3600:.1f} hours ago" for what, ago in found.items()),
        "none within 24 hours",
        "Tell the administrators, who can see more with `dmesg` and `nvidia-smi -q`.",
    )


def _records(log: Path) -> Iterator[tuple[float, str]]:
    """Yield the time since the start of the node, in seconds, and the text of each record."""
    descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(descriptor, _RECORD)
            except BlockingIOError:  # all of it was read
                return
            except BrokenPipeError:  # the oldest records were overwritten meanwhile
                continue
            if not record:  # a plain file, in tests
                return
            for line in record.decode(errors="replace").splitlines():
                head, _, text = line.partition(";")
                facts = head.split(",")
                if len(facts) >= 3 and facts[2].isdecimal():
                    yield int(facts[2]) / 1e6, text
    finally:
        os.close(descriptor)
