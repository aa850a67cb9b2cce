"""The health of AMD's GPUs, by amdsmi, in the form of `nvidia_health`.

The names of functions and keys are those of amdsmi 6.1 to 7.0. A value that a GPU does not have is
"N/A", or the function raises an error; the check is then unknown. There was no AMD GPU to try this
on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpctrain.doctor.checks import affinity
from hpctrain.doctor.checks.gpus import gpu_facts, links
from hpctrain.doctor.checks.gpus.gpu_facts import GpuFacts
from hpctrain.doctor.finding import Finding, good, unknown
from hpctrain.units import MIB

# What lowers the clock at this moment: by the hardware at once, or by its firmware bit by bit.
_HARD = {"active_prochot_thrm": "heat or power (PROCHOT)"}
_SOFT = {
    "active_socket_thrm": "heat (socket)",
    "active_vr_thrm": "heat (voltage regulator)",
    "active_hbm_thrm": "heat (memory)",
}
# The generation of PCIe by GT/s of one lane.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_PENDING, _UNRESERVABLE = 1, 2  # amdsmi_memory_page_status_t; 0 is a page that is set aside
_MICRO = 1e-6


class AmdHealth:
    """One GPU by the initialised module `amdsmi`; each check is a method that returns a finding.

    `label` is for the table, such as `GPU 0`. The handle is None if amdsmi does not know the GPU.
    """

    def __init__(self, smi: Any, label: str, uuid: str, handle: Any) -> None:
        self._smi, self.label, self.uuid, self._handle = smi, label, uuid, handle

    def facts(self) -> GpuFacts:
        """Return its facts. AmdSmiException, LookupError: the GPU does not answer."""
        smi, handle = self._smi, self._handle
        if handle is None:
            raise LookupError("amdsmi does not know this GPU")
        asic = smi.amdsmi_get_gpu_asic_info(handle)
        driver = self._ask(lambda: smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
        memory = self._ask(lambda: _number(smi.amdsmi_get_gpu_vram_usage(handle), "vram_total"))
        clock = self._ask(
            lambda: _number(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX), "max_clk")
        )
        power = self._ask(lambda: self._limits()[0])
        link = self._ask(self._link)
        return GpuFacts(
            str(asic.get("market_name", "AMD GPU")),
            str(driver or "unknown"),
            None if memory is None else int(memory * MIB),
            None if clock is None else int(clock),
            power,
            None if link is None else links.pcie_bandwidth(link[1][0], link[0][1]),
        )

    def findings(self) -> Iterator[Finding]:
        """Yield what is found of the GPU."""
        checks: dict[str, Callable[[], Finding]] = {
            "ECC": self._ecc,
            "retired memory": self._retired,
            "throttling": self._throttling,
            "temperature": self._temperature,
            "power limit": self._power,
            "other processes": self._processes,
            "PCIe": lambda: links.pcie(self.label, *self._link()),
            "NUMA": self._numa,
        }
        for what, check in checks.items():
            try:
                yield check()
            except (self._smi.AmdSmiException, LookupError, TypeError, AttributeError) as error:
                why = f"amdsmi does not tell it ({error})"
                yield unknown(f"{self.label}: {what}", why)
        yield unknown(
            f"{self.label}: Infinity Fabric",
            "the state of its links is not looked at (`amd-smi xgmi`); a full check measures them",
        )

    def _ask(self, function: Callable[[], Any]) -> Any:
        """Return an answer of amdsmi, or None if it does not tell."""
        try:
            return function()
        except (self._smi.AmdSmiException, LookupError, TypeError, AttributeError):
            return None

    def _ecc(self) -> Finding:
        counted = self._smi.amdsmi_get_gpu_total_ecc_count(self._handle)
        corrected, uncorrected = (
            int(_number(counted, key)) for key in ("correctable_count", "uncorrectable_count")
        )
        return gpu_facts.errors_of_memory(self.label, corrected, uncorrected)

    def _retired(self) -> Finding:
        check = f"{self.label}: retired memory"
        pages = self._smi.amdsmi_get_gpu_bad_page_info(self._handle)
        if isinstance(pages, str):  # some versions: "No bad pages found."
            pages = []
        states = [_state(page["status"]) for page in pages]
        found = f"{len(states)} pages retired"
        if _UNRESERVABLE in states:
            cure = "Ask the administrators to replace the GPU: bad memory is still in use."
            return Finding(check, "fail", f"{found}; some cannot be set aside", "none", cure)
        if _PENDING in states:
            cure = "Ask the administrators to reset the GPU: bad pages wait for that."
            return Finding(check, "warn", f"{found}; some wait for a reset", "none waits", cure)
        return good(check, found)

    def _throttling(self) -> Finding:
        status = self._smi.amdsmi_get_violation_status(self._handle)
        known = {name: status[name] for name in (*_HARD, *_SOFT) if _is_known(status.get(name))}
        if not known:
            why = "amdsmi does not tell it of this kind of GPU"
            return unknown(f"{self.label}: throttling", why)
        hard = [text for name, text in _HARD.items() if known.get(name)]
        soft = [text for name, text in _SOFT.items() if known.get(name)]
        return gpu_facts.throttling(self.label, hard, soft)

    def _temperature(self) -> Finding:
        """Judge the hottest place against the temperature at which the GPU lowers its clock."""
        smi, place = self._smi, self._smi.AmdSmiTemperatureType.HOTSPOT
        metric = smi.AmdSmiTemperatureMetric
        now, critical = (
            float(smi.amdsmi_get_temp_metric(self._handle, place, each))
            for each in (metric.CURRENT, metric.CRITICAL)
        )
        return gpu_facts.temperature(self.label, now, critical if 0 < critical < 200 else None)

    def _limits(self) -> tuple[float, float]:
        """Return the power limit and its default, in watts."""
        cap = self._smi.amdsmi_get_power_cap_info(self._handle)
        limit, usual = _number(cap, "power_cap"), _number(cap, "default_power_cap")
        return limit * _MICRO, usual * _MICRO

    def _power(self) -> Finding:
        return gpu_facts.power_limit(self.label, *self._limits(), "amd-smi set --power-cap")

    def _processes(self) -> Finding:
        running = self._smi.amdsmi_get_gpu_process_list(self._handle)
        memory: dict[int, int] = {}
        for each in running:
            used = int(_number(each.get("memory_usage", {}), "vram_mem"))
            if used:  # a process that only has the driver open computes nothing here
                memory[int(each["pid"])] = used
        whole = self._smi.amdsmi_get_gpu_vram_usage(self._handle)
        used, size = (int(MIB * _number(whole, key)) for key in ("vram_used", "vram_total"))
        return gpu_facts.processes(self.label, memory, used, size)

    def _numa(self) -> Finding:
        bus = str(self._smi.amdsmi_get_gpu_device_bdf(self._handle))
        return affinity.near_gpu(self.label, bus, os.sched_getaffinity(0))

    def _link(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return generation and width of the PCIe link, as it is and as it could be."""
        info = self._smi.amdsmi_get_pcie_info(self._handle)
        now, best = info["pcie_metric"], info["pcie_static"]
        return (
            (_generation(now, "pcie_speed"), int(_number(now, "pcie_width"))),
            (_generation(best, "max_pcie_speed"), int(_number(best, "max_pcie_width"))),
        )


def _is_known(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _number(values: Mapping[str, Any], key: str) -> float:
    """Return a number; LookupError where amdsmi has N/A or does not know the key."""
    value = values.get(key)
    if not _is_known(value):
        raise LookupError(f"{key} is {value}")
    return float(value)  # type: ignore[arg-type]


def _generation(values: Mapping[str, Any], key: str) -> int:
    speed = _number(values, key)
    speed = speed / 1000 if speed >= 1000 else speed  # MT/s; in some versions GT/s
    if speed not in _GENERATIONS:
        raise LookupError(f"{key} is {speed:g} GT/s")
    return _GENERATIONS[speed]


def _state(status: Any) -> int:
    """Return the state of a page; ctypes may have wrapped the number."""
    return int(getattr(status, "value", status))
