"""What the readings of a GPU mean: each function takes the name of its check, and one reading.

`hpctrain.monitor.gpu_library` describes the readings.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from rich.filesize import decimal

from hpctrain.doctor.finding import Finding, bounded, good, judged, unknown
from hpctrain.monitor.cgroup import cpu_list

_DEVICES = Path("/sys/bus/pci/devices")
_MANY_CORRECTED = 10_000
_PART_OF_POWER = 0.9
_HOT = 85.0  # degrees Celsius: about the most that GPUs of data centres work at, under load
# What the driver itself takes.
_RESERVED, _PART_RESERVED = 2**30, 0.02
# GB/s of one lane in one direction, by generation, with the loss of the encoding.
_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_FEWEST_LANES = 0.45  # boards for several GPUs give each 8 of 16 lanes by design
_OWN = "another job of yours"


def ecc(check: str, corrected: int | None, uncorrected: int | None, usual: bool = True) -> Finding:
    """Judge what ECC has counted since the driver was loaded.

    None means that it is off; `usual` is whether the maker of the card delivers it with ECC on.
    """
    if corrected is None or uncorrected is None:
        if not usual:
            return good(check, "is off, as usual for this card")
        cure = "Ask the administrators to switch ECC on: wrong bits are not noticed."
        return Finding(check, "warn", "is off", "on", cure)
    found = f"{uncorrected:,} uncorrected, {corrected:,} corrected errors"
    cure = "Ask the administrators to reset the GPU, and to replace it if the errors come back."
    few = not uncorrected and corrected < _MANY_CORRECTED
    return judged(check, few, found, "none uncorrected", cure, "fail" if uncorrected else "warn")


def retired(check: str, found: str, waits: bool, failed: bool) -> Finding:
    """Judge the memory that was given up: some may wait, and no more may be left to replace it."""
    if failed:
        cure = "Ask the administrators to replace the GPU: it cannot repair its memory."
        return Finding(check, "fail", f"{found}; no more can be", "spare memory", cure)
    if waits:
        cure = "Ask the administrators to reset the GPU: a repair of its memory waits for that."
        return Finding(check, "warn", f"{found}; one waits for a reset", "none waits", cure)
    return good(check, found)


def throttling(check: str, hard: Sequence[str], soft: Sequence[str]) -> Finding:
    """Judge what lowers the clock of a GPU at rest: reasons of its hardware, and of its driver."""
    cure = "Ask the administrators to look at cooling and power of the node."
    found, expected = ", ".join((*hard, *soft)) or "no", "no, with nothing running"
    return judged(check, found == "no", found, expected, cure, "fail" if hard else "warn")


def temperature(check: str, celsius: float, critical: float | None) -> Finding:
    """Judge the temperature of a GPU on which nothing runs; at `critical` it lowers its clock."""
    most = _HOT if critical is None else min(_HOT, critical)
    return judged(
        check,
        celsius < most,
        f"{celsius:.0f} degrees Celsius",
        f"below {most:.0f} with nothing running",
        "Ask the administrators to look at the cooling of the node.",
        "fail" if critical is not None and celsius >= critical else "warn",
    )


def mig(check: str, is_cut: bool) -> Finding:
    """Judge a whole GPU that may be cut into instances."""
    cure = "Ask for an instance by its type (site.gpu_type), or for nodes without MIG."
    found = "the GPU is cut into instances" if is_cut else "off"
    return judged(check, not is_cut, found, "off", cure)


def power_limit(check: str, limit: float, usual: float, command: str) -> Finding:
    """Judge the power limit in watts against that of the maker; `command` changes it."""
    return bounded(
        check,
        limit,
        f"{limit:.0f} W",
        warn_below=_PART_OF_POWER * usual,
        expected=f"{usual:.0f} W",
        cure="The GPU is slower than others: ask the administrators whether that is wanted "
        f"(`{command}`).",
    )


def pcie_bandwidth(generation: int, width: int) -> float:
    """Return GB/s in one direction: Gen4 x8 has as much as Gen3 x16."""
    return _LANE.get(generation, _LANE[max(_LANE)]) * width


def pcie(check: str, now: tuple[int, int], best: tuple[int, int]) -> Finding:
    """Judge a PCIe link by generation and width, as it is now and as GPU and slot can have it.

    A GPU at rest lowers its generation to save power, and raises it under load. So the generation
    counts that the GPU and its slot can have, and the width that the link has now. Half of the
    lanes show against the other GPUs of the job (`hpctrain.doctor.comparison`), and against the
    file of the hardware.
    """
    has, could = pcie_bandwidth(best[0], now[1]), pcie_bandwidth(*best)
    return bounded(
        check,
        has,
        f"Gen{now[0]} x{now[1]}, up to Gen{best[0]} x{now[1]} = {has:.0f} GB/s",
        warn_below=_FEWEST_LANES * could,
        expected=f"Gen{best[0]} x{best[1]} = {could:.0f} GB/s",
        cure="Ask the administrators to reseat the GPU or its riser: the link has lost lanes.",
    )


def nvlink(check: str, active: int, total: int) -> Finding:
    """Judge the NVLinks of a GPU: how many are up of those that its chip has.

    Boards use a part of them by design, such as 12 of 18, so a lost one shows only against the
    other GPUs of the job (`hpctrain.doctor.comparison`).
    """
    return judged(
        check,
        bool(active) or not total,
        f"{active} of {total} links are up" if total else "this GPU has none",
        f"{total}, unless the board has no bridge",
        "If GPUs of this cluster are usually bridged, ask the administrators to look at the "
        "fabric manager (`systemctl status nvidia-fabricmanager`).",
    )


def numa(check: str, bus_id: str, devices: Path = _DEVICES) -> Finding:
    """Judge whether this process may run on the socket to which its GPU is attached.

    The address is that of PCI as NVML writes it: `00000000:17:00.0`.
    """
    cpus = os.sched_getaffinity(0)
    name = bus_id.lower()[-12:]  # the kernel writes a domain of 4 digits
    try:
        local = cpu_list((devices / name / "local_cpulist").read_text().strip())
    except (OSError, ValueError):
        return unknown(check, "the kernel does not tell which cores are near")
    near = len(cpus & local)
    cure = "Set site.distribution=block:block and site.cpu_bind=cores."
    found = f"{near} of {len(cpus)} CPUs are near"
    return judged(check, near > 0 or not local, found, "CPUs of the same socket", cure)


def reserved(size: int) -> float:
    """Return the bytes that a driver may take of a GPU's memory of this size."""
    return max(_RESERVED, _PART_RESERVED * size)


def processes(check: str, memory: Mapping[int, int], used: int, size: int) -> Finding:
    """Judge what others than this job have on a GPU, whoever they are, in bytes.

    `memory` is what each process has, by its number. `used` has that of processes that nobody sees,
    too.
    """
    owners = {pid: _owner(pid) for pid in memory}
    if unseen := [pid for pid, owner in owners.items() if owner is None]:
        return unknown(check, f"{len(unseen)} processes that are not visible in this container")
    others = [f"{pid} of {owner}" for pid, owner in owners.items() if owner]
    own = [memory[pid] for pid, owner in owners.items() if not owner]
    # Some drivers do not tell the memory of a process.
    taken = max(0, used - sum(own)) if all(own) else sum(memory.values())
    if not others and taken < reserved(size):
        return good(check, "none")
    who = f"processes {', '.join(others)}" if others else "no process that is seen here"
    cure = (
        "Ask the administrators to end what runs there: your job should have this GPU alone. What "
        "an earlier job of yours has left, end yourself (`nvidia-smi`, `kill`); a server of MPS "
        "keeps it until it is told to quit (`nvidia-cuda-mps-control`)."
    )
    found = f"{decimal(taken)} of {decimal(size)} are in use, by {who}"
    return Finding(check, "fail" if 2 * taken > size else "warn", found, "none", cure)


def _owner(pid: int) -> str | None:
    """Return whose a process is; "" if it is of this job, None if it is not visible here."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    if uid != os.getuid():
        return f"user {uid}"
    own, other = (_belongs(each) for each in (os.getpid(), pid))
    return "" if pid == os.getpid() or own == other else _OWN


def _belongs(pid: int) -> str:
    """Return the number of the Slurm job of a process, or that of its parent, its launcher."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.environ().get("SLURM_JOB_ID") or str(process.ppid())
    return ""
