"""The sensors of the job's own AMD GPUs, by amdsmi, the successor of rocm-smi's library.

ROCm installs amdsmi; it is no dependency of this package. torch's UUID of an AMD GPU holds the 16
letters of its serial number, by which it is found here. The names of the metrics are those of
NVIDIA's GPUs.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.monitor.gpus import read_each

log = logging.getLogger(__name__)
_NOT_SUPPORTED = 2  # AMDSMI_STATUS_NOT_SUPPORTED


def is_here() -> bool:
    """Return whether this host has amdsmi, and no driver of NVIDIA."""
    return not Path("/proc/driver/nvidia").exists() and (
        importlib.util.find_spec("amdsmi") is not None
    )


def serial(uuid: str) -> str:
    """Return the serial number in a UUID as torch writes it: each byte is a letter.

    A UUID that has no such letters is returned as it is.
    """
    try:
        return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")).decode("ascii").lower()
    except ValueError:
        return uuid.lower()


def handles(smi: Any) -> dict[str, Any]:
    """Return amdsmi's handle of each GPU here, by its serial number; `smi` was initialised."""
    found = {}
    for handle in smi.amdsmi_get_processor_handles():
        number = smi.amdsmi_get_gpu_asic_info(handle).get("asic_serial", "")
        found[str(number).lower().removeprefix("0x")] = handle
    return found


class AmdGpus:
    """The AMD GPUs of the job on this node; the same as `hpctrain.monitor.gpus.Gpus`.

    `smi` is the module `amdsmi`, or one with the same functions.
    """

    def __init__(self, uuids: Sequence[str], smi: Any = None) -> None:
        self.facts: dict[str, str] = {}
        self._handles: dict[int, Any] = {}
        self._missing: set[tuple[int, str]] = set()
        self._energy: dict[int, float] = {}
        self._smi = smi
        if uuids:
            self._open(uuids)

    def _open(self, uuids: Sequence[str]) -> None:
        if self._smi is None:
            import amdsmi  # type: ignore[import-not-found, unused-ignore]

            self._smi = amdsmi
        smi = self._smi
        try:
            smi.amdsmi_init()
            there = handles(smi)
        except smi.AmdSmiException as error:
            log.warning("GPUs are not measured: %s", error)
            return
        for number, uuid in enumerate(uuids):
            if (handle := there.get(serial(uuid))) is None:
                log.warning("GPU %d (%s) is not measured: amdsmi does not know it", number, uuid)
                continue
            self._handles[number] = handle
            self.facts[f"gpu_{number}"] = str(self._asic(handle).get("market_name", "AMD GPU"))
            self.facts.setdefault("driver", self._driver(handle))

    def _asic(self, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._smi.amdsmi_get_gpu_asic_info(handle)
        return found

    def _driver(self, handle: Any) -> str:
        try:
            return str(self._smi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
        except (self._smi.AmdSmiException, KeyError):
            return "unknown"

    def read(self) -> dict[str, float]:
        """Return the value of every sensor that answers; one that fails costs itself alone."""
        return read_each(
            self._handles,
            self._sensors,
            self._missing,
            (self._smi.AmdSmiException, KeyError, TypeError) if self._smi else (),
            lambda error: getattr(error, "err_code", None) == _NOT_SUPPORTED,
        )

    def _sensors(self, number: int) -> Iterator[tuple[str, Callable[[Any], dict[str, float]]]]:
        smi = self._smi
        yield "memory", self._memory
        yield "use", lambda h: _known(smi.amdsmi_get_gpu_activity(h), {"gfx_activity": _USE})
        yield "power", self._power
        yield "energy", lambda h: self._used_energy(number, h)
        yield "temperature", self._temperature
        yield "clock", self._clock
        yield (
            "ECC",
            lambda h: _known(
                smi.amdsmi_get_gpu_total_ecc_count(h),
                {
                    "correctable_count": "ecc_corrected_errors",
                    "uncorrectable_count": "ecc_uncorrected_errors",
                },
            ),
        )

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._smi.amdsmi_get_gpu_vram_usage(handle)
        return {  # amdsmi counts in MiB
            "memory_usage_megabytes": memory["vram_used"] * 2**20 / 1e6,
            "memory_usage_percentage": 100 * memory["vram_used"] / memory["vram_total"],
        }

    def _power(self, handle: Any) -> dict[str, float]:
        info = self._smi.amdsmi_get_power_info(handle)
        # Of the two, each kind of GPU has one.
        values = _known(info, {"average_socket_power": "a", "current_socket_power": "c"})
        if not values:
            return {}
        watts = values.get("c", 0.0) or values.get("a", 0.0)
        found = {"power_usage_watts": watts}
        for limit in _known(info, {"power_limit": "limit"}).values():
            if limit > 0:
                watts_limit = limit / 1e6 if limit > 1e5 else limit  # some versions: microwatts
                found["power_usage_percentage"] = 100 * watts / watts_limit
        return found

    def _used_energy(self, number: int, handle: Any) -> dict[str, float]:
        """Return the energy since the first reading; the counter has a resolution of its own."""
        counted = self._smi.amdsmi_get_energy_count(handle)
        name = "energy_accumulator" if "energy_accumulator" in counted else "power"
        now = counted[name] * counted["counter_resolution"] / 1e6
        first = self._energy.setdefault(number, now)
        if now < first:  # the driver was loaded anew
            self._energy[number] = first = now
        return {"energy_joules": now - first}

    def _temperature(self, handle: Any) -> dict[str, float]:
        smi = self._smi
        kind, now = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return {"temperature_celsius": float(smi.amdsmi_get_temp_metric(handle, kind, now))}

    def _clock(self, handle: Any) -> dict[str, float]:
        info = self._smi.amdsmi_get_clock_info(handle, self._smi.AmdSmiClkType.GFX)
        return _known(info, {"clk": "clock_megahertz", "cur_clk": "clock_megahertz"})


_USE = "utilization_percentage"


def _known(values: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    """Return the numbers under other names; amdsmi writes N/A where a GPU has no such sensor."""
    return {
        name: float(values[key])
        for key, name in names.items()
        if isinstance(values.get(key), (int, float))
    }
