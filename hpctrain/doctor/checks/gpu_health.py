"""The health of the job's GPUs, by NVML.

    uuids ── Nvml ── GpuFacts, which are compared over all ranks
                └─── findings: ECC, retired pages, throttling, power, MIG,
                                        others' processes, links, NUMA

Nothing needs root. What NVML does not tell of a GPU, such as the ECC of one for games, is said to
be unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from hpctrain.doctor.checks import affinity, links
from hpctrain.doctor.finding import Finding, Verdict, bounded, good, unknown
from hpctrain.monitor import amd
from hpctrain.monitor.gpus import handle_of

# Reasons of NVML for a low clock, by bit.
_HARD = {0x08: "hardware slowdown", 0x40: "heat (hardware)", 0x80: "power brake"}
_SOFT = {0x20: "heat (software)"}
_MANY_CORRECTED, _MANY_RETIRED = 10_000, 60
_PART_OF_POWER = 0.9
_MOST_LINKS = 18


@dataclass(frozen=True)
class GpuFacts:
    """What must be the same for all GPUs of a job; None where NVML does not tell.

    Attributes:
        name: The model.
        driver: The version of the driver.
        memory_bytes: Its memory.
        clock_mhz: The highest clock of its multiprocessors.
        power_w: Its power limit.
        pcie_gb_s: The bandwidth of its PCIe link in one direction.
        nvlinks: The number of NVLinks that are up.
    """

    name: str
    driver: str
    memory_bytes: int | None = None
    clock_mhz: int | None = None
    power_w: float | None = None
    pcie_gb_s: float | None = None
    nvlinks: int | None = None


def checked(
    uuids: Sequence[str], nvml: Any = None, first: int = 0
) -> tuple[list[GpuFacts], list[Finding]]:
    """Check GPUs.

    Args:
        uuids: The UUIDs of the GPUs, as NVML or torch write them.
        nvml: The module `pynvml`, or one with the same functions.
        first: The number of the first of them in the table.

    Returns:
        The facts of those GPUs that answer, and what was found.
    """
    if not uuids:
        return [], []
    if nvml is None and amd.is_here():
        return [], [
            unknown("GPUs", "the health of AMD's GPUs is not looked at (`amd-smi` tells it)")
        ]
    if nvml is None:
        try:
            import pynvml

            nvml = pynvml
        except ImportError:
            cure = "Install nvidia-ml-py."
            return [], [unknown("GPUs", "the package nvidia-ml-py is not installed", cure)]
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        cure = "Ask the administrators to reload the driver of this node (`nvidia-smi` tells more)."
        return [], [Finding("GPUs", "fail", f"NVML: {error}", "the driver answers", cure)]
    facts: list[GpuFacts] = []
    findings: list[Finding] = []
    for number, uuid in enumerate(uuids, first):
        one = _Gpu(nvml, f"GPU {number}", uuid)
        try:
            facts.append(one.facts())
        except nvml.NVMLError as error:
            cure = "Ask the administrators to drain the node: the GPU has fallen off the bus."
            found = f"{uuid}: {error}"
            findings.append(Finding(f"GPU {number}", "fail", found, "an answer", cure))
            continue
        findings += one.findings()
    return facts, findings


class _Gpu:
    """One GPU; each check is a method that returns a finding."""

    def __init__(self, nvml: Any, label: str, uuid: str) -> None:
        self._nvml, self._label, self._uuid = nvml, label, uuid
        self._handle: Any = None

    def facts(self) -> GpuFacts:
        """Open the GPU and return its facts. NVMLError: it does not answer."""
        nvml = self._nvml
        handle = self._handle = handle_of(self._nvml, self._uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
        name, driver = nvml.nvmlDeviceGetName(handle), nvml.nvmlSystemGetDriverVersion()
        power = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        clock = self._ask(lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM))
        link = self._ask(self._link)
        counted = self._ask(self._nvlinks)
        return GpuFacts(
            _word(name),
            _word(driver),
            memory,
            clock,
            None if power is None else power / 1000,
            None if link is None else links.pcie_bandwidth(link[1][0], link[0][1]),
            None if counted is None else counted[0],
        )

    def findings(self) -> Iterator[Finding]:
        """Yield what is found of an open GPU."""
        nvml, label = self._nvml, self._label
        if nvml.nvmlDeviceIsMigDeviceHandle(self._handle):
            yield unknown(label, "a MIG instance: its health is that of the whole GPU, not shown")
            return
        checks: dict[str, Callable[[], Finding]] = {
            "ECC": self._ecc,
            "retired memory": self._retired,
            "throttling": self._throttling,
            "MIG": self._mig,
            "power limit": self._power,
            "other processes": self._processes,
            "PCIe": lambda: links.pcie(label, *self._link(self._handle)),
            "NVLink": lambda: links.nvlink(label, *self._nvlinks(self._handle)),
            "NUMA": self._numa,
        }
        for what, check in checks.items():
            try:
                yield check()
            except nvml.NVMLError as error:
                yield unknown(f"{label}: {what}", f"NVML does not tell it ({error})")

    def _ask(self, function: Callable[[Any], Any]) -> Any:
        """Return an answer of NVML, or None if it does not tell."""
        try:
            return function(self._handle)
        except self._nvml.NVMLError:
            return None

    def _ecc(self) -> Finding:
        nvml, check = self._nvml, f"{self._label}: ECC"
        if not nvml.nvmlDeviceGetEccMode(self._handle)[0]:
            cure = "Ask the administrators to switch ECC on: wrong bits are not noticed."
            return Finding(check, "warn", "is off", "on", cure)
        corrected, uncorrected = (
            nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, nvml.NVML_VOLATILE_ECC)
            for kind in (
                nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
        )
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

    def _retired(self) -> Finding:
        nvml, check = self._nvml, f"{self._label}: retired memory"
        try:
            corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(self._handle)
            count = corrected + uncorrected
            found = f"{count} rows remapped"
        except nvml.NVMLError:  # GPUs before Ampere retire whole pages
            causes = (
                nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
                nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
            )
            count = sum(len(nvml.nvmlDeviceGetRetiredPages(self._handle, one)) for one in causes)
            pending = nvml.nvmlDeviceGetRetiredPagesPendingStatus(self._handle)
            failed, found = count >= _MANY_RETIRED, f"{count} pages retired"
        if failed:
            cure = "Ask the administrators to replace the GPU: it cannot repair its memory."
            return Finding(check, "fail", f"{found}; no more can be", "spare memory", cure)
        if pending:
            cure = "Ask the administrators to reset the GPU: a repair of its memory waits for that."
            return Finding(check, "warn", f"{found}; one waits for a reset", "none waits", cure)
        return good(check, found)

    def _throttling(self) -> Finding:
        check = f"{self._label}: throttling"
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        hard = [text for bit, text in _HARD.items() if reasons & bit]
        soft = [text for bit, text in _SOFT.items() if reasons & bit]
        if not hard and not soft:
            return good(check, "no")
        return Finding(
            check,
            "fail" if hard else "warn",
            ", ".join(hard + soft),
            "no, with nothing running",
            "Ask the administrators to look at cooling and power of the node.",
        )

    def _mig(self) -> Finding:
        check = f"{self._label}: MIG"
        if not self._nvml.nvmlDeviceGetMigMode(self._handle)[0]:
            return good(check, "off")
        cure = "Ask for an instance by its type (site.gpu_type), or for nodes without MIG."
        return Finding(check, "warn", "the GPU is cut into instances", "off", cure)

    def _power(self) -> Finding:
        nvml = self._nvml
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000
        usual = nvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle) / 1000
        return bounded(
            f"{self._label}: power limit",
            limit,
            f"{limit:.0f} W",
            warn_below=_PART_OF_POWER * usual,
            expected=f"{usual:.0f} W",
            cure="The GPU is slower than others: ask the administrators whether that is wanted "
            "(`nvidia-smi -pl`).",
        )

    def _processes(self) -> Finding:
        check = f"{self._label}: other processes"
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        owners = {each.pid: _owner(each.pid) for each in running}
        strangers = [pid for pid, uid in owners.items() if uid not in (None, os.getuid())]
        unseen = [pid for pid, uid in owners.items() if uid is None]
        if strangers:
            used = sum(each.usedGpuMemory or 0 for each in running if each.pid in strangers)
            found = f"processes {', '.join(map(str, strangers))} of other users, {decimal(used)}"
            cure = "Ask the administrators to end them: your job should have this GPU alone."
            return Finding(check, "fail", found, "none", cure)
        if unseen:
            return unknown(check, f"{len(unseen)} processes that are not visible in this container")
        return good(check, "none")

    def _numa(self) -> Finding:
        bus = _word(self._nvml.nvmlDeviceGetPciInfo(self._handle).busId)
        return affinity.near_gpu(self._label, bus, os.sched_getaffinity(0))

    def _link(self, handle: Any) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return generation and width of the PCIe link, as it is and as it could be."""
        nvml = self._nvml
        now = nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
        best = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
        return (now[0](handle), now[1](handle)), (best[0](handle), best[1](handle))

    def _nvlinks(self, handle: Any) -> tuple[int, int]:
        """Return how many NVLinks are up, and how many there are."""
        nvml, states = self._nvml, list[int]()
        for link in range(_MOST_LINKS):
            try:
                states.append(nvml.nvmlDeviceGetNvLinkState(handle, link))
            except nvml.NVMLError:  # there are no more
                break
        return sum(states), len(states)


def count(seen: int, asked: int) -> Finding:
    """Judge how many GPUs a rank sees.

    Args:
        seen: The GPUs that torch sees.
        asked: The GPUs that Slurm has given on this node, or that the config asks for.
    """
    verdict: Verdict = "fail" if seen < asked else "pass"
    cure = (
        "Ask the administrators to drain the node: a GPU does not answer (`nvidia-smi`, `dmesg`)."
    )
    expected = f"{asked}" if verdict == "fail" else ""
    return Finding("number of GPUs", verdict, f"{seen}", expected, cure * (verdict == "fail"))


def _owner(pid: int) -> int | None:
    """Return the user id of a process; None if it is not visible here."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _word(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text
