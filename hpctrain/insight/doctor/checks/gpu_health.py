"""The facts and the health of the job's GPUs. Nothing needs root.

    uuids ── NVML ─┬─ GpuFacts, which are compared over all ranks
                   └─ rows: check, reading, judgement ── findings

What a GPU does not tell is said to be unknown, and so is all of AMD's GPUs.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.filesize import decimal

from hpctrain.base.processes import gpu_driver
from hpctrain.insight.doctor.finding import Finding, Result, bad, unknown
from hpctrain.insight.monitor.cgroup import cpu_list
from hpctrain.insight.monitor.nvidia import Nvidia

_DEVICES = Path("/sys/bus/pci/devices")
_MANY_CORRECTED = 10_000
# What the driver itself takes.
_RESERVED, _PART_RESERVED = 2**30, 0.02

_Judged = tuple[Result, str]  # what was found


@dataclass(frozen=True)
class GpuFacts:
    """What must be the same for all GPUs of a job; None where the driver does not tell."""

    name: str  # the model
    driver: str | None = None
    memory_bytes: int | None = None
    clock_mhz: int | None = None  # the highest of its multiprocessors
    power_w: float | None = None  # its limit
    nvlinks: int | None = None  # that are up


def checked(
    uuids: Sequence[str], first: int = 0, library: Nvidia | None = None, *, nccl: bool = False
) -> tuple[list[GpuFacts], list[Finding]]:
    """Return the facts of those GPUs that answer, and what was found.

    `uuids` are identities of GPUs that torch sees, so what NVML does not tell stops no job, unless
    it says that a GPU is lost, or `nccl` needs it. `first` is the number of
    the first of them in the table.
    """
    if not uuids:
        return [], []
    if library is None and gpu_driver.nvidia() is None and gpu_driver.amd() is not None:
        return [], [unknown("GPUs", "AMD's: their health is not looked at", "`amd-smi` tells it.")]
    library = library or Nvidia()
    try:
        library.open()
    except library.errors as error:
        if nccl:
            return [], [bad("GPUs", "fail", f"NVML: {error}; NCCL needs it")]
        return [], [replace(bad("GPUs", "unknown", f"NVML: {error}"), expected="")]
    facts, findings = list[GpuFacts](), list[Finding]()
    for number, uuid in enumerate(uuids, first):
        try:
            gpu = library.find(uuid)
            facts.append(_facts(library, gpu))
        except library.errors as error:
            found = unknown(f"GPU {number}", f"{uuid}: NVML does not know it ({error})")
            if library.is_lost(error):
                found = bad("lost GPU", "fail", f"{uuid}: {error}", f"GPU {number}")
            findings.append(found)
            continue
        findings += _findings(library, gpu, f"GPU {number}")
    return facts, findings


def wait_until_free(
    uuids: Sequence[str], wait_s: float = 60.0, library: Nvidia | None = None
) -> list[str]:
    """Wait until nobody uses the memory of GPUs that this process has not used yet.

    Return what is in use after so many seconds, in words. Nothing is waited for that NVML does not
    tell.
    """
    end = time.monotonic() + wait_s
    library = library or Nvidia()
    with suppress(*library.errors):
        library.open()
        while taken := [*_taken(library, uuids)]:
            if time.monotonic() > end:
                return taken
            time.sleep(0.5)
    return []


def _taken(library: Nvidia, uuids: Sequence[str]) -> Iterator[str]:
    for uuid in uuids:
        gpu = library.find(uuid)
        part = library.is_part(gpu)
        *_, used, size = library.read("memory" if part else "processes", gpu)
        if used >= reserved(size):
            yield f"{decimal(used)} of {decimal(size)} of GPU {uuid} are in use"


def _facts(library: Nvidia, gpu: Any) -> GpuFacts:
    def told(reading: str) -> Any:
        try:
            return library.readings[reading](gpu)
        except library.errors:
            return None

    return GpuFacts(
        library.readings["model"](gpu),  # an error if the GPU is lost
        told("driver"),
        told("size"),
        told("top_clock"),
        told("limit"),
        told("nvlinks"),
    )


def _findings(library: Nvidia, gpu: Any, label: str) -> Iterator[Finding]:
    if library.is_part(gpu):
        yield unknown(label, "a MIG instance: its health is that of the whole GPU, not shown")
        return
    for name, check in CHECKS.items():
        try:
            yield check.finding(name, f"{label}: {name}", *library.read(check.reading, gpu))
        except library.errors as error:
            yield unknown(f"{label}: {name}", f"NVML does not tell it ({error})")


class Check(NamedTuple):
    """A row of the table."""

    reading: str
    judge: Callable[..., _Judged]  # of the values of the reading

    def finding(self, kind: str, check: str, *values: object) -> Finding:
        """Return what the values of a reading mean."""
        result, found = self.judge(*values)
        if result in ("warn", "fail"):
            return bad(kind, result, found, check)
        return Finding(check, result, found)


def _result(fails: bool, warns: bool) -> Result:
    return "fail" if fails else "warn" if warns else "pass"


def _ecc(corrected: int | None, uncorrected: int | None, usual: bool = True) -> _Judged:
    """Judge what was counted since the driver was loaded; None means that ECC is off.

    `usual` is whether the maker of the card delivers it with ECC on.
    """
    if corrected is None or uncorrected is None:
        return ("warn", "is off") if usual else ("pass", "is off, as usual for this card")
    found = f"{uncorrected:,} uncorrected, {corrected:,} corrected errors"
    return _result(uncorrected > 0, corrected >= _MANY_CORRECTED), found


def _retired(found: str, waits: bool, failed: bool) -> _Judged:
    more = "; no more can be" if failed else "; one waits for a reset" * waits
    return _result(failed, waits), found + more


def _numa(bus_id: str) -> _Judged:
    """Judge whether this process may run on the socket to which its GPU is attached.

    The address is that of PCI as NVML writes it: `00000000:17:00.0`.
    """
    cpus = os.sched_getaffinity(0)
    name = bus_id.lower()[-12:]  # the kernel writes a domain of 4 digits
    try:
        local = cpu_list((_DEVICES / name / "local_cpulist").read_text().strip())
    except (OSError, ValueError):
        return "unknown", "the kernel does not tell which cores are near"
    near = len(cpus & local)
    return _result(False, not near and bool(local)), f"{near} of {len(cpus)} CPUs are near"


def reserved(size: int) -> float:
    """Return the bytes that a driver may take of a GPU's memory of this size."""
    return max(_RESERVED, _PART_RESERVED * size)


def _processes(memory: Mapping[int, int], used: int, size: int) -> _Judged:
    """Judge what others than this job have on a GPU, whoever they are, in bytes.

    `memory` is what each process has, by its number. `used` has that of processes that nobody sees,
    too.
    """
    owners = {pid: _owner(pid) for pid in memory}
    if unseen := [pid for pid, owner in owners.items() if owner is None]:
        return "unknown", f"{len(unseen)} processes that are not visible in this container"
    others = [f"{pid} of {owner}" for pid, owner in owners.items() if owner]
    own = [memory[pid] for pid, owner in owners.items() if not owner]
    # Some drivers do not tell the memory of a process.
    taken = max(0, used - sum(own)) if all(own) else sum(memory.values())
    if not others and taken < reserved(size):
        return "pass", "none"
    who = f"processes {', '.join(others)}" if others else "no process that is seen here"
    found = f"{decimal(taken)} of {decimal(size)} are in use, by {who}"
    return _result(2 * taken > size, True), found


def _owner(pid: int) -> str | None:
    """Return whose a process is; "" if it is of this job, None if it is not visible here."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    if uid != os.getuid():
        return f"user {uid}"
    own, other = (_belongs(each) for each in (os.getpid(), pid))
    return "" if pid == os.getpid() or own == other else "another job of yours"


def _belongs(pid: int) -> str:
    """Return the number of the Slurm job of a process, or that of its parent, its launcher."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.environ().get("SLURM_JOB_ID") or str(process.ppid())
    return ""


OTHERS = "other processes"
CHECKS = {
    "ECC": Check("ecc_if_on", _ecc),
    "retired memory": Check("retired", _retired),
    "throttling": Check(
        "slowdowns",
        lambda hard, soft: (_result(bool(hard), bool(soft)), ", ".join((*hard, *soft)) or "no"),
    ),
    OTHERS: Check("processes", _processes),
    "NUMA": Check("bus", _numa),
}
