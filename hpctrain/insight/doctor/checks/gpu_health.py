"""The facts and the health of the job's GPUs. Nothing needs root.

    uuids ── NVML ─┬─ GpuFacts, which are compared over all ranks
                   └─ rows: check, reading, judgement ── findings

What a GPU does not tell is said to be unknown, and so is all of AMD's GPUs.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rich.filesize import decimal

from hpctrain.base.processes import gpu_driver
from hpctrain.insight.doctor.checks.gpu_judgements import CHECKS, reserved
from hpctrain.insight.doctor.finding import Finding, bad, unknown
from hpctrain.insight.monitor.nvidia import Nvidia


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
