"""The facts of a GPU that are compared over ranks, and what is judged alike for every maker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
from rich.filesize import decimal

from hpctrain.doctor.finding import Finding, Verdict, bounded, good, unknown

_MANY_CORRECTED = 10_000
_PART_OF_POWER = 0.9
_HOT = 85.0  # degrees Celsius: about the most that GPUs of data centres work at, under load
# What the driver itself takes.
_RESERVED, _PART_RESERVED = 2**30, 0.02


@dataclass(frozen=True)
class GpuFacts:
    """What must be the same for all GPUs of a job; None where the driver does not tell."""

    name: str  # the model
    driver: str
    memory_bytes: int | None = None
    clock_mhz: int | None = None  # the highest of its multiprocessors
    power_w: float | None = None  # its limit
    pcie_gb_s: float | None = None  # in one direction, with the lanes that it has now
    nvlinks: int | None = None  # that are up


def errors_of_memory(gpu: str, corrected: int, uncorrected: int) -> Finding:
    """Judge what ECC has counted since the driver was loaded."""
    check = f"{gpu}: ECC"
    found = f"{uncorrected:,} uncorrected, {corrected:,} corrected errors"
    if not uncorrected and corrected < _MANY_CORRECTED:
        return good(check, found)
    return Finding(
        check,
        "fail" if uncorrected else "warn",
        found,
        "none uncorrected",
        "Ask the administrators to reset the GPU, and to replace it if the errors come back.",
    )


def throttling(gpu: str, hard: Sequence[str], soft: Sequence[str]) -> Finding:
    """Judge what lowers the clock of a GPU at rest: reasons of its hardware, and of its driver."""
    check = f"{gpu}: throttling"
    if not hard and not soft:
        return good(check, "no")
    return Finding(
        check,
        "fail" if hard else "warn",
        ", ".join((*hard, *soft)),
        "no, with nothing running",
        "Ask the administrators to look at cooling and power of the node.",
    )


def power_limit(gpu: str, limit: float, usual: float, command: str) -> Finding:
    """Judge the power limit in watts against that of the maker; `command` changes it."""
    return bounded(
        f"{gpu}: power limit",
        limit,
        f"{limit:.0f} W",
        warn_below=_PART_OF_POWER * usual,
        expected=f"{usual:.0f} W",
        cure="The GPU is slower than others: ask the administrators whether that is wanted "
        f"(`{command}`).",
    )


def temperature(gpu: str, celsius: float, critical: float | None = None) -> Finding:
    """Judge the temperature of a GPU on which nothing runs; at `critical` it lowers its clock."""
    check, found = f"{gpu}: temperature", f"{celsius:.0f} degrees Celsius"
    most = _HOT if critical is None else min(_HOT, critical)
    if celsius < most:
        return good(check, found)
    cure = "Ask the administrators to look at the cooling of the node."
    verdict: Verdict = "warn" if critical is None or celsius < critical else "fail"
    return Finding(check, verdict, found, f"below {most:.0f} with nothing running", cure)


def processes(gpu: str, memory: Mapping[int, int], used: int, size: int) -> Finding:
    """Judge what others than this job have on a GPU, whoever they are, in bytes.

    `memory` is what each process has, by its number. `used` has that of processes that nobody sees,
    too.
    """
    check = f"{gpu}: other processes"
    owners = {pid: _owner(pid) for pid in memory}
    if unseen := [pid for pid, owner in owners.items() if owner is None]:
        return unknown(check, f"{len(unseen)} processes that are not visible in this container")
    others = [f"{pid} of {owner}" for pid, owner in owners.items() if owner]
    own = [memory[pid] for pid, owner in owners.items() if not owner]
    # Some drivers do not tell the memory of a process.
    taken = max(0, used - sum(own)) if all(own) else sum(memory.values())
    if not others and taken < max(_RESERVED, _PART_RESERVED * size):
        return good(check, "none")
    who = f"processes {', '.join(others)}" if others else "no process that is seen here"
    cure = (
        "Ask the administrators to end what runs there: your job should have this GPU alone. What "
        "an earlier job of yours has left, end yourself (`nvidia-smi`, `kill`)."
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
    return "" if pid == os.getpid() or own == other else "another job of yours"


def _belongs(pid: int) -> str:
    """Return the number of the Slurm job of a process, or that of its parent, its launcher."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.environ().get("SLURM_JOB_ID") or str(process.ppid())
    return ""
