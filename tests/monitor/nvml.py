"""A stand-in for pynvml with the answers that NVML gives; there is no GPU here.

It has two H100: on the first the job's processes run, the second is another job's. A third is cut
into MIG instances, of which one is the job's.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_GPU_IS_LOST = 15
NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_VOLATILE_ECC = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Nvml:
    """The module; the attributes are what a test changes.

    Attributes:
        asked: The UUIDs of the devices whose sensors were read.
        lost: UUIDs of GPUs that have fallen off the bus.
        reasons: Why clocks are lowered, as NVML's bits.
        energy: The counter in millijoules.
        ecc: Corrected and uncorrected errors; None: not supported, as on a GPU for games.
        remapped: Rows remapped for corrected and uncorrected errors, whether one waits for a reset,
            and whether that has failed.
        nvlinks: Whether each of the links is up.
        processes: The processes that compute on the GPU, by number; each has 1 GiB.
        used: The bytes of its memory that are in use.
        ecc_modes: Whether ECC is on, and whether the maker delivers the card with it on.
        c2c: Whether the GPU is linked to its processor by NVLink-C2C, as in a GH200.
        broken: Functions that raise an error, with its number.
    """

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.lost: set[str] = set()
        self.reasons, self.energy = 0, 1_000_000
        self.ecc: tuple[int, int] | None = None
        self.remapped = [0, 0, 0, 0]
        self.nvlinks = [1] * 18
        self.processes: list[int] = []
        self.used = 20_000_000_000
        self.ecc_modes, self.c2c = (1, 1), 0
        self.broken: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.broken:
            raise NVMLError(self.broken[name])
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML"):
            return globals()[name]
        if name not in ANSWERS:
            raise AttributeError(name)
        return lambda *asked: ANSWERS[name](self, *asked)

    def reads(self, handle: str, value: Any, whole: bool = True) -> Any:
        """Return the value of a sensor; a GPU that is lost has none."""
        self.asked.add(handle)
        if handle in self.lost:
            raise NVMLError(NVML_ERROR_GPU_IS_LOST)
        if whole and handle.startswith("MIG"):
            raise AssertionError("a MIG instance has no such sensor: it is that of the whole GPU")
        return value

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "GPU-b", "MIG-c"):
            raise NVMLError(NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        if self.ecc is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return [self.ecc_modes[0]] * 2

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, _: int) -> Any:
        self.nvmlDeviceGetEccMode(handle)
        assert self.ecc is not None
        return self.reads(handle, self.ecc[kind])

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= len(self.nvlinks):
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return self.nvlinks[link]

    def nvmlDeviceGetClockInfo(self, handle: str, _: int) -> Any:
        return self.reads(handle, 1755)


def _process(pid: int) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=2**30)


# `n` is the module, `h` the GPU.
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda n: None,
    "nvmlSystemGetDriverVersion": lambda n: "570.86.15",
    "nvmlDeviceGetDefaultEccMode": lambda n, h: [n.ecc_modes[1]],
    "nvmlDeviceGetC2cModeInfoV": lambda n, h: SimpleNamespace(isC2cEnabled=n.c2c),
    "nvmlDeviceIsMigDeviceHandle": lambda n, h: h.startswith("MIG"),
    "nvmlDeviceGetName": lambda n, h: n.reads(
        h, "NVIDIA H100 80GB HBM3" + " MIG 1g.10gb" * h.startswith("MIG"), whole=False
    ),
    "nvmlDeviceGetPciInfo": lambda n, h: SimpleNamespace(busId="00000000:17:00.0"),
    "nvmlDeviceGetEnforcedPowerLimit": lambda n, h: 700_000,
    "nvmlDeviceGetMaxClockInfo": lambda n, h, _: 1980,
    "nvmlDeviceGetMemoryInfo": lambda n, h: n.reads(
        h, SimpleNamespace(used=n.used, total=80_000_000_000), whole=False
    ),
    "nvmlDeviceGetUtilizationRates": lambda n, h: n.reads(h, SimpleNamespace(gpu=87, memory=40)),
    "nvmlDeviceGetPowerUsage": lambda n, h: n.reads(h, 350_000),
    "nvmlDeviceGetRemappedRows": lambda n, h: n.reads(h, n.remapped),
    "nvmlDeviceGetComputeRunningProcesses": lambda n, h: n.reads(h, [*map(_process, n.processes)]),
    "nvmlDeviceGetTotalEnergyConsumption": lambda n, h: n.reads(h, n.energy),
    "nvmlDeviceGetTemperature": lambda n, h, _: n.reads(h, 61),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda n, h: n.reads(h, n.reasons),
}
