"""The facts of a GPU that are compared over ranks, and what is judged alike for every maker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from hpctrain.doctor.finding import Finding, bounded, good, unknown

_MANY_CORRECTED = 10_000
_PART_OF_POWER = 0.9


@dataclass(frozen=True)
class GpuFacts:
    """What must be the same for all GPUs of a job; None where the driver does not tell.

    Attributes:
        name: The model.
        driver: The version of the driver.
        memory_bytes: Its memory.
        clock_mhz: The highest clock of its multiprocessors.
        power_w: Its power limit.
        pcie_gb_s: The bandwidth in one direction that its PCIe link can have, with the lanes that
            it has now.
        nvlinks: The number of NVLinks that are up.
    """

    name: str
    driver: str
    memory_bytes: int | None = None
    clock_mhz: int | None = None
    power_w: float | None = None
    pcie_gb_s: float | None = None
    nvlinks: int | None = None


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
    """Judge what lowers the clock of a GPU on which nothing runs.

    Args:
        gpu: The name of the GPU for the table.
        hard: The reasons of its hardware.
        soft: Those of its driver.
    """
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
    """Judge the power limit of a GPU.

    Args:
        gpu: The name of the GPU for the table, such as `GPU 0`.
        limit: Its limit in watts.
        usual: The limit that its maker has set.
        command: The command of administrators that changes it.
    """
    return bounded(
        f"{gpu}: power limit",
        limit,
        f"{limit:.0f} W",
        warn_below=_PART_OF_POWER * usual,
        expected=f"{usual:.0f} W",
        cure="The GPU is slower than others: ask the administrators whether that is wanted "
        f"(`{command}`).",
    )


def processes(gpu: str, memory: Mapping[int, int]) -> Finding:
    """Judge the processes that compute on a GPU.

    Args:
        gpu: The name of the GPU for the table.
        memory: The bytes of the GPU that each of them has, by its number.
    """
    check = f"{gpu}: other processes"
    owners = {pid: _owner(pid) for pid in memory}
    strangers = [pid for pid, uid in owners.items() if uid not in (None, os.getuid())]
    unseen = [pid for pid, uid in owners.items() if uid is None]
    if strangers:
        used = decimal(sum(memory[pid] for pid in strangers))
        found = f"processes {', '.join(map(str, strangers))} of other users, {used}"
        cure = "Ask the administrators to end them: your job should have this GPU alone."
        return Finding(check, "fail", found, "none", cure)
    if unseen:
        return unknown(check, f"{len(unseen)} processes that are not visible in this container")
    return good(check, "none")


def _owner(pid: int) -> int | None:
    """Return the user id of a process; None if it is not visible here."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def word(text: str | bytes) -> str:
    """Return what a library says as text; some versions of NVML return bytes."""
    return text.decode() if isinstance(text, bytes) else text
