"""The sensors of the job's own NVIDIA GPUs, by NVML; those of other jobs are never read.

A GPU is known by its UUID: indices differ between what NVML, CUDA and Slurm call GPU 0. Of a MIG
instance only its memory is read, because power, clocks and use are those of the whole GPU, which
other jobs share.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

_MB = 1e6
# What slows a GPU down. Others of NVML's reasons are wanted, such as that nothing runs on it.
_HEAT = 0x20 | 0x40
_POWER = 0x04 | 0x80


def handle_of(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of a GPU or a MIG instance; without such a device NVML raises.

    Torch writes the UUID without the kind before it.
    """
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names[:-1]:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
    return nvml.nvmlDeviceGetHandleByUUID(names[-1])


def read_each(
    handles: Mapping[int, Any],
    sensors: Callable[[int], Iterable[tuple[str, Callable[[Any], dict[str, float]]]]],
    missing: set[tuple[int, str]],
    errors: tuple[type[Exception], ...],
    is_missing: Callable[[Exception], bool],
) -> dict[str, float]:
    """Return the values of all sensors of GPUs, such as `gpu_0_power_usage_watts`.

    `sensors` yields the name and the function of each sensor of a GPU. Those in `missing` a GPU has
    not; they are not asked, and this function adds to them what `is_missing` says. The other
    `errors` of the library cost the values of that sensor alone.
    """
    found: dict[str, float] = {}
    for number, handle in handles.items():
        for name, sensor in sensors(number):
            if (number, name) in missing:
                continue
            try:
                values = sensor(handle)
            except errors as error:
                if is_missing(error):
                    missing.add((number, name))
                log.warning("gpu_%d has no %s: %s", number, name, error)
                continue
            found |= {f"gpu_{number}_{key}": float(value) for key, value in values.items()}
    return found


class Gpus:
    """The GPUs of the job on this node, whole ones or MIG instances, in the order of their numbers.

    `nvml` is the module `pynvml`, or one with the same functions. `facts` are the name of each GPU,
    and the version of the driver.
    """

    def __init__(self, uuids: Sequence[str], nvml: Any = None) -> None:
        self.facts: dict[str, str] = {}
        self._handles: dict[int, Any] = {}
        self._mig: set[int] = set()
        self._missing: set[tuple[int, str]] = set()  # sensors that this GPU has not
        self._energy: dict[int, float] = {}
        self._traffic: dict[tuple[int, str], tuple[float, float]] = {}
        self._nvml = nvml
        if uuids:
            self._open(uuids)

    def _open(self, uuids: Sequence[str]) -> None:
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            self.facts["driver"] = word(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError as error:
            log.warning("GPUs are not measured: %s", error)
            return
        for number, uuid in enumerate(uuids):
            try:
                handle = handle_of(self._nvml, uuid)
                self._handles[number] = handle
                if self._nvml.nvmlDeviceIsMigDeviceHandle(handle):
                    self._mig.add(number)
                self.facts[f"gpu_{number}"] = word(self._nvml.nvmlDeviceGetName(handle))
            except self._nvml.NVMLError as error:
                log.warning("GPU %d (%s) is not measured: %s", number, uuid, error)

    def read(self) -> dict[str, float]:
        """Return the value of every sensor that answers, such as `gpu_0_power_usage_watts`.

        A sensor that fails costs its own value alone. One that the GPU has not is asked once.
        """
        nvml = self._nvml
        return read_each(
            self._handles,
            self._sensors,
            self._missing,
            (nvml.NVMLError,) if nvml else (),
            lambda error: getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED,
        )

    def _sensors(self, number: int) -> Iterator[tuple[str, Callable[[Any], dict[str, float]]]]:
        yield "memory", self._memory
        if number in self._mig:
            return
        nvml = self._nvml
        yield "use", lambda h: {"utilization_percentage": nvml.nvmlDeviceGetUtilizationRates(h).gpu}
        yield "power", self._power
        yield "energy", lambda h: self._used_energy(number, h)
        yield (
            "temperature",
            lambda h: {
                "temperature_celsius": nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)
            },
        )
        yield (
            "clock",
            lambda h: {"clock_megahertz": nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)},
        )
        yield "throttling", self._throttling
        yield "ECC", self._ecc
        yield "PCIe", self._pcie
        yield "NVLink", lambda h: self._nvlink(number, h)

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "memory_usage_megabytes": memory.used / _MB,
            "memory_usage_percentage": 100 * memory.used / memory.total,
        }

    def _power(self, handle: Any) -> dict[str, float]:
        watts = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        limit = self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        return {"power_usage_watts": watts, "power_usage_percentage": 100 * watts / limit}

    def _used_energy(self, number: int, handle: Any) -> dict[str, float]:
        """Return the energy since the first reading, of a counter in millijoules."""
        now = self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        first = self._energy.setdefault(number, now)
        if now < first:  # the driver was loaded anew
            self._energy[number] = first = now
        return {"energy_joules": now - first}

    def _throttling(self, handle: Any) -> dict[str, float]:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return {
            "throttled_by_heat": float(bool(reasons & _HEAT)),
            "throttled_by_power": float(bool(reasons & _POWER)),
        }

    def _ecc(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        volatile = nvml.NVML_VOLATILE_ECC
        return {
            "ecc_corrected_errors": nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile
            ),
            "ecc_uncorrected_errors": nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile
            ),
        }

    def _pcie(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        sent = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
        received = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        return {  # NVML counts in kB per second
            "pcie_transmit_megabytes_per_second": sent / 1000,
            "pcie_receive_megabytes_per_second": received / 1000,
        }

    def _nvlink(self, number: int, handle: Any) -> dict[str, float]:
        """Return the rates of all links of a GPU, from counters in KiB."""
        nvml, now, rates = self._nvml, time.monotonic(), dict[str, float]()
        fields = {
            "transmit": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            "receive": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        }
        all_links = 0xFFFFFFFF  # UINT_MAX stands for the sum over the links
        asked = [(field, all_links) for field in fields.values()]
        for name, value in zip(fields, nvml.nvmlDeviceGetFieldValues(handle, asked), strict=True):
            if value.nvmlReturn:
                raise nvml.NVMLError(value.nvmlReturn)
            total = value.value.ullVal * 1024
            before = self._traffic.get((number, name))
            self._traffic[number, name] = (now, total)
            if before is not None and now > before[0] and total >= before[1]:
                rate = (total - before[1]) / (now - before[0]) / _MB
                rates[f"nvlink_{name}_megabytes_per_second"] = rate
        return rates


def word(text: str | bytes) -> str:
    """Return what a library says as text; some versions of NVML return bytes."""
    return text.decode() if isinstance(text, bytes) else text
