"""A stand-in for amdsmi with the answers of amdsmi 7.0; there is no AMD GPU here.

It has two MI300X. Values that a GPU does not have are "N/A", or raise an error.
"""

from types import SimpleNamespace
from typing import Any

SERIALS = ("4d8a4b2c1e9f0a33", "0011223344556677")
# torch writes the letters of the serial number as the bytes of a UUID.
UUIDS = tuple(
    f"{t[:8]}-{t[8:12]}-{t[12:16]}-{t[16:20]}-{t[20:]}"
    for t in (serial.encode().hex() for serial in SERIALS)
)


class AmdSmiException(Exception):
    def __init__(self, err_code: int) -> None:
        super().__init__(f"error {err_code}")
        self.err_code = err_code


class AmdSmi:
    """The module; the attributes are what a test changes.

    Attributes:
        asked: The numbers of the GPUs whose sensors were read.
        broken: Functions that raise an error, with its number.
        energy: The counter, in steps of 15.3 microjoules.
        ecc: Corrected and uncorrected errors.
        processes: The memory of each process on the GPU in bytes, by its number.
        used_mib: The memory of the GPU that is in use.
        serials: The serial number of each GPU; the two dies of an MI250X have the same.
    """

    AmdSmiException = AmdSmiException
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    AmdSmiClkType = SimpleNamespace(GFX=0)

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.serials = SERIALS
        self.broken: dict[str, int] = {}
        self.energy = 1_000_000
        self.ecc = (3, 0)
        self.processes: dict[int, int] = {}
        self.used_mib = 49_148

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("amdsmi_") and name in self.broken:
            raise AmdSmiException(self.broken[name])
        return super().__getattribute__(name)

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def amdsmi_get_gpu_asic_info(self, gpu: int) -> dict[str, Any]:
        return {
            "market_name": "AMD Instinct MI300X",
            "asic_serial": f"0x{self.serials[gpu].upper()}",
        }

    def amdsmi_get_gpu_driver_info(self, gpu: int) -> dict[str, Any]:
        return {"driver_name": "amdgpu", "driver_version": "6.12.12"}

    def amdsmi_get_gpu_activity(self, gpu: int) -> dict[str, Any]:
        self.asked.add(gpu)
        return {"gfx_activity": 93, "umc_activity": 40, "mm_activity": "N/A"}

    def amdsmi_get_gpu_vram_usage(self, gpu: int) -> dict[str, Any]:
        return {"vram_total": 196_592, "vram_used": self.used_mib}

    def amdsmi_get_power_info(self, gpu: int) -> dict[str, Any]:
        return {
            "current_socket_power": 600,
            "average_socket_power": "N/A",
            "power_limit": 750_000_000,
        }

    def amdsmi_get_energy_count(self, gpu: int) -> dict[str, Any]:
        return {"energy_accumulator": self.energy, "counter_resolution": 15.3, "timestamp": 1}

    def amdsmi_get_temp_metric(self, gpu: int, kind: int, metric: int) -> int:
        return 71

    def amdsmi_get_clock_info(self, gpu: int, kind: int) -> dict[str, Any]:
        return {"clk": 2100, "min_clk": 132, "max_clk": 2100}

    def amdsmi_get_gpu_total_ecc_count(self, gpu: int) -> dict[str, Any]:
        corrected, uncorrected = self.ecc
        return {
            "correctable_count": corrected,
            "uncorrectable_count": uncorrected,
            "deferred_count": 0,
        }

    def amdsmi_get_gpu_process_list(self, gpu: int) -> list[dict[str, Any]]:
        return [
            {"name": "python", "pid": pid, "mem": used, "memory_usage": {"vram_mem": used}}
            for pid, used in self.processes.items()
        ]

    def amdsmi_get_gpu_device_bdf(self, gpu: int) -> str:
        return f"0000:{12 + gpu:02X}:00.0"
