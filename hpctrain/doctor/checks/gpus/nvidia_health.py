"""The health of NVIDIA's GPUs, by NVML.

Nothing needs root. What NVML does not tell of a GPU, such as the ECC of one for games, is said to
be unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from hpctrain.doctor.checks import affinity
from hpctrain.doctor.checks.gpus import gpu_facts, links
from hpctrain.doctor.checks.gpus.gpu_facts import GpuFacts
from hpctrain.doctor.finding import Finding, good, unknown
from hpctrain.monitor.gpus import handle_of, word

# Reasons of NVML for a low clock, by bit.
_HARD = {0x08: "hardware slowdown", 0x40: "heat (hardware)", 0x80: "power brake"}
_SOFT = {0x20: "heat (software)"}
_MANY_RETIRED, _MOST_LINKS = 60, 18


class NvidiaHealth:
    """One GPU by the initialised module `pynvml`; each check is a method that returns a finding."""

    def __init__(self, nvml: Any, label: str, uuid: str) -> None:
        self._nvml, self.label, self.uuid = nvml, label, uuid
        self._handle: Any = None

    def facts(self) -> GpuFacts:
        """Open the GPU and return its facts. NVMLError: it does not answer."""
        nvml = self._nvml
        handle = self._handle = handle_of(self._nvml, self.uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
        name, driver = nvml.nvmlDeviceGetName(handle), nvml.nvmlSystemGetDriverVersion()
        power = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        clock = self._ask(lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM))
        link = self._ask(self._link)
        counted = self._ask(self._nvlinks)
        return GpuFacts(
            word(name),
            word(driver),
            memory,
            clock,
            None if power is None else power / 1000,
            None if link is None else links.pcie_bandwidth(link[1][0], link[0][1]),
            None if counted is None else counted[0],
        )

    def findings(self) -> Iterator[Finding]:
        """Yield what is found of an open GPU."""
        nvml, label = self._nvml, self.label
        if nvml.nvmlDeviceIsMigDeviceHandle(self._handle):
            yield unknown(label, "a MIG instance: its health is that of the whole GPU, not shown")
            return
        checks: dict[str, Callable[[], Finding]] = {
            "ECC": self._ecc,
            "retired memory": self._retired,
            "throttling": self._throttling,
            "temperature": self._temperature,
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
        nvml, check = self._nvml, f"{self.label}: ECC"
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
        return gpu_facts.errors_of_memory(self.label, corrected, uncorrected)

    def _retired(self) -> Finding:
        nvml, check = self._nvml, f"{self.label}: retired memory"
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
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        hard = [text for bit, text in _HARD.items() if reasons & bit]
        soft = [text for bit, text in _SOFT.items() if reasons & bit]
        return gpu_facts.throttling(self.label, hard, soft)

    def _temperature(self) -> Finding:
        kind = self._nvml.NVML_TEMPERATURE_GPU
        return gpu_facts.temperature(
            self.label, self._nvml.nvmlDeviceGetTemperature(self._handle, kind)
        )

    def _mig(self) -> Finding:
        check = f"{self.label}: MIG"
        if not self._nvml.nvmlDeviceGetMigMode(self._handle)[0]:
            return good(check, "off")
        cure = "Ask for an instance by its type (site.gpu_type), or for nodes without MIG."
        return Finding(check, "warn", "the GPU is cut into instances", "off", cure)

    def _power(self) -> Finding:
        nvml = self._nvml
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000
        usual = nvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle) / 1000
        return gpu_facts.power_limit(self.label, limit, usual, "nvidia-smi -pl")

    def _processes(self) -> Finding:
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        processes = {each.pid: each.usedGpuMemory or 0 for each in running}
        return gpu_facts.processes(self.label, processes, memory.used, memory.total)

    def _numa(self) -> Finding:
        bus = word(self._nvml.nvmlDeviceGetPciInfo(self._handle).busId)
        return affinity.near_gpu(self.label, bus, os.sched_getaffinity(0))

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
