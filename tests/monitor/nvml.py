"""A stand-in for pynvml with the answers that NVML gives; there is no GPU here.

It has two H100: on the first the job's processes run, the second is another job's. A third is cut
into MIG instances, of which one is the job's.
"""

from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_GPU_IS_LOST = 15
NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_VOLATILE_ECC = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139


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
        pcie: Generation and width of the link now, and at best.
        nvlinks: Whether each of the links is up.
        processes: The processes that compute on the GPU, by number; each has 1 GiB.
        used: The bytes of its memory that are in use.
        celsius: Its temperature.
        mig: Whether the GPU is cut into instances.
        limit: The power limit in watts; by default it is 700.
    """

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.lost: set[str] = set()
        self.reasons, self.energy, self.links = 0, 1_000_000, 0
        self.ecc: tuple[int, int] | None = None
        self.remapped = [0, 0, 0, 0]
        self.pcie = ((5, 16), (5, 16))
        self.nvlinks = [1] * 18
        self.processes: list[int] = []
        self.mig, self.limit, self.celsius = 0, 700, 61
        self.used = 20_000_000_000

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML"):
            return globals()[name]
        raise AttributeError(name)

    def _ask(self, handle: str, whole: bool = True) -> None:
        self.asked.add(handle)
        if handle in self.lost:
            raise NVMLError(NVML_ERROR_GPU_IS_LOST)
        if whole and handle.startswith("MIG"):
            raise AssertionError("a MIG instance has no such sensor: it is that of the whole GPU")

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-a", "GPU-b", "MIG-c"):
            raise NVMLError(NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:
        return handle.startswith("MIG")

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H100 80GB HBM3" + (b" MIG 1g.10gb" if handle.startswith("MIG") else b"")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._ask(handle, whole=False)
        return SimpleNamespace(used=self.used, total=80_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._ask(handle)
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._ask(handle)
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return self.limit * 1000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, handle: str, _: int) -> int:
        return 1980

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        if self.ecc is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetRemappedRows(self, handle: str) -> list[int]:
        self._ask(handle)
        return self.remapped

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self._ask(handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in self.processes]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return self.pcie[0][0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return self.pcie[0][1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return self.pcie[1][0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return self.pcie[1][1]

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= len(self.nvlinks):
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return self.nvlinks[link]

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId=b"00000000:17:00.0")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._ask(handle)
        return self.energy

    def nvmlDeviceGetTemperature(self, handle: str, _: int) -> int:
        self._ask(handle)
        return self.celsius

    def nvmlDeviceGetClockInfo(self, handle: str, _: int) -> int:
        self._ask(handle)
        return 1755

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._ask(handle)
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, _: int) -> int:
        self._ask(handle)
        if self.ecc is None:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return self.ecc[kind]

    def nvmlDeviceGetPcieThroughput(self, handle: str, kind: int) -> int:
        self._ask(handle)
        return 2_000 + kind

    def nvmlDeviceGetFieldValues(self, handle: str, asked: list[tuple[int, int]]) -> list[Any]:
        self._ask(handle)
        value = SimpleNamespace(ullVal=self.links)
        return [SimpleNamespace(nvmlReturn=0, value=value) for _ in asked]
