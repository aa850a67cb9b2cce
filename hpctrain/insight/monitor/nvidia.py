"""NVIDIA's GPUs by NVML. A GPU is known by its UUID: NVML, CUDA and Slurm number GPUs differently.

monitor.sensors           rows (sensor, reading, metrics)   ──┬── Nvidia ── pynvml
doctor.checks.gpu_health  rows (check, reading, judgement)  ──┘

Of a MIG instance only the memory is its own. Power, clocks and use are those of the whole GPU,
which other jobs share.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

# NVML's reasons for a low clock. Others of them are wanted, such as that nothing runs on the GPU.
_HEAT = 0x20 | 0x40
_POWER = 0x04 | 0x80
_HARD = {0x08: "hardware slowdown", 0x40: "heat (hardware)", 0x80: "power brake"}
_SOFT = {0x20: "heat (software)"}
_MOST_PAGES = 64  # that can be retired (NVIDIA's "GPU memory error management")
_NEVER = 3, 4, 13  # NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND: nobody is told here
_LOST = 15, 16, 999  # GPU_IS_LOST, RESET_REQUIRED, UNKNOWN


class Nvidia:
    """NVML, by the module `pynvml`, or another one that answers as it does.

    Attributes:
        errors: What the methods and the readings may raise.
        readings: The functions by their names; each takes what `find` has returned. They are bytes,
            percent, watts, joules, MHz, degrees Celsius.
    """

    def __init__(self, module: Any = None) -> None:
        self.module = nvml = import_module("pynvml") if module is None else module
        self.errors: tuple[type[Exception], ...] = (nvml.NVMLError,)
        self.readings: Mapping[str, Callable[[Any], Any]] = {
            "model": lambda gpu: nvml.nvmlDeviceGetName(gpu),
            "driver": lambda gpu: nvml.nvmlSystemGetDriverVersion(),
            "part": lambda gpu: bool(nvml.nvmlDeviceIsMigDeviceHandle(gpu)),
            "size": lambda gpu: self._memory(gpu)[1],
            "memory": self._memory,
            "use": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "power": lambda gpu: (nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, self._limit(gpu)),
            "limit": self._limit,
            "energy": lambda gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
            "heat": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "clock": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "top_clock": lambda gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "throttled": self._throttled,
            "slowdowns": self._slowdowns,
            "ecc": self._ecc,
            # The same; None and None where it is off, and whether the card is delivered with it.
            "ecc_if_on": lambda gpu: (
                self._ecc(gpu)
                if nvml.nvmlDeviceGetEccMode(gpu)[0]
                else (None, None, bool(nvml.nvmlDeviceGetDefaultEccMode(gpu)[0]))
            ),
            "retired": self._retired,
            "nvlinks": self._nvlinks,
            "processes": self._processes,
            "bus": lambda gpu: nvml.nvmlDeviceGetPciInfo(gpu).busId,
        }

    def open(self) -> None:
        """Connect to the driver."""
        self.module.nvmlInit()

    def find(self, identity: str) -> Any:
        """Return the GPU or the MIG instance; torch writes its UUID without the kind before it."""
        known = identity.startswith(("GPU-", "MIG-"))
        *first, last = [identity] if known else [f"GPU-{identity}", f"MIG-{identity}"]
        for name in first:
            try:
                return self.module.nvmlDeviceGetHandleByUUID(name)
            except self.errors as error:
                if self.is_lost(error):
                    raise
        return self.module.nvmlDeviceGetHandleByUUID(last)

    def lacks(self, error: Exception) -> bool:
        """Return whether an error says that nobody is told here what was asked for."""
        return getattr(error, "value", None) in _NEVER

    def is_lost(self, error: Exception) -> bool:
        """Return whether an error says that the GPU has fallen off the bus, or needs a reset."""
        return getattr(error, "value", None) in _LOST

    def is_part(self, gpu: Any) -> bool:
        """Return whether it is a part of a GPU, whose other readings are those of the whole."""
        try:
            return bool(self.readings["part"](gpu))
        except self.errors as error:
            if not self.lacks(error):  # a GPU before Ampere has no parts
                raise
            return False

    def read(self, reading: str, gpu: Any) -> tuple[Any, ...]:
        """Return the values of a reading."""
        found = self.readings[reading](gpu)
        return found if isinstance(found, tuple) else (found,)

    def _memory(self, gpu: Any) -> tuple[int, int]:
        """Return the bytes in use, and all."""
        found = self.module.nvmlDeviceGetMemoryInfo(gpu)
        return found.used, found.total

    def _limit(self, gpu: Any) -> float:
        return float(self.module.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)

    def _throttled(self, gpu: Any) -> tuple[bool, bool]:
        """Return whether heat, and whether the limit of the power lowers its clock."""
        reasons = self.module.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        return bool(reasons & _HEAT), bool(reasons & _POWER)

    def _slowdowns(self, gpu: Any) -> tuple[list[str], ...]:
        """Return what lowers the clock at rest, in words: of its hardware, and of its driver."""
        reasons = self.module.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        return tuple([t for bit, t in kind.items() if reasons & bit] for kind in (_HARD, _SOFT))

    def _ecc(self, gpu: Any) -> tuple[int, ...]:
        """Return the errors that were corrected, and that could not be."""
        nvml = self.module
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        ask, since = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        return tuple(ask(gpu, kind, since) for kind in kinds)

    def _retired(self, gpu: Any) -> tuple[str, bool, bool]:
        """Return what was given up; whether a repair waits, and whether no more can be given up.

        GPUs before Ampere give up pages, others replace rows.
        """
        nvml = self.module
        try:
            corrected, uncorrected, waits, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
        except self.errors as error:
            if not self.lacks(error):
                raise
            causes = range(nvml.NVML_PAGE_RETIREMENT_CAUSE_COUNT)
            pages = sum(len(nvml.nvmlDeviceGetRetiredPages(gpu, cause)) for cause in causes)
            waits = nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu)
            return f"{pages} pages retired", bool(waits), pages >= _MOST_PAGES
        return f"{corrected + uncorrected} rows remapped", bool(waits), bool(failed)

    def _nvlinks(self, gpu: Any) -> int:
        """Return how many links are up."""
        up = 0
        for link in range(self.module.NVML_NVLINK_MAX_LINKS):
            with suppress(*self.errors):  # of a link that this GPU has not
                up += self.module.nvmlDeviceGetNvLinkState(gpu, link)
        return up

    def _processes(self, gpu: Any) -> tuple[dict[int, int], int, int]:
        """Return the bytes of each process by its number, the bytes in use, and all."""
        running = self.module.nvmlDeviceGetComputeRunningProcesses(gpu)
        memory = {each.pid: each.usedGpuMemory or 0 for each in running}
        used, size = self._memory(gpu)
        # There the memory is a NUMA node, in which Linux keeps pages of processes that have ended
        # (NVML API reference, nvmlDeviceGetMemoryInfo).
        return memory, sum(memory.values()) if self._is_c2c(gpu) else used, size

    def _is_c2c(self, gpu: Any) -> bool:
        """Return whether NVLink-C2C leads to the processor, as in a GH200."""
        with suppress(self.module.NVMLError, AttributeError):  # a driver before 535
            return bool(self.module.nvmlDeviceGetC2cModeInfoV(gpu).isC2cEnabled)
        return False
