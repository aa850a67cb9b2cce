"""AMD's GPUs by amdsmi, the successor of rocm-smi's library, which ROCm installs.

The names of functions and keys are those of amdsmi 6.1 to 7.0. A value that a GPU does not have is
"N/A", or the function raises an error. There was no AMD GPU to try this on.
"""

import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hpctrain.base.processes import gpu_driver
from hpctrain.base.units import MIB
from hpctrain.insight.monitor.gpu_library import Library, NotTold

_MICRO = 1e-6


def is_here() -> bool:
    """Return whether this host has the driver or the library of AMD, and no driver of NVIDIA."""
    return gpu_driver.nvidia() is None and (
        gpu_driver.amd() is not None or importlib.util.find_spec("amdsmi") is not None
    )


class Amd(Library):
    """The module `amdsmi`."""

    NAME, MODULE, TOOL = "amdsmi", "amdsmi", "amd-smi"
    # The command of vLLM's installation guide for ROCm.
    INSTALL = "Install ROCm's package: `python -m pip install /opt/rocm/share/amd_smi`."
    NUMBER, NEVER = "err_code", (2, 3, 10)  # NOT_SUPPORTED, NOT_YET_IMPLEMENTED, NO_PERM

    def __init__(self, module: Any = None) -> None:
        super().__init__(module)
        smi = self.module
        # Versions of amdsmi differ in functions, keys and types.
        of_python = LookupError, TypeError, ValueError, AttributeError, OSError
        self.errors = (smi.AmdSmiException, *of_python)
        self._handles: dict[str, list[Any]] = {}  # by serial number, and by PCI address
        self.readings = {
            "model": lambda gpu: str(
                smi.amdsmi_get_gpu_asic_info(gpu).get("market_name", "AMD GPU")
            ),
            "driver": self._driver,
            "size": lambda gpu: self._memory(gpu)[1],
            "memory": self._memory,
            "use": lambda gpu: _number(smi.amdsmi_get_gpu_activity(gpu), "gfx_activity"),
            "power": self._power,
            "energy": self._energy,
            "heat": self._heat,
            "clock": lambda gpu: _number(self._clocks(gpu), "cur_clk", "clk"),
            "top_clock": lambda gpu: int(_number(self._clocks(gpu), "max_clk")),
            "ecc": self._ecc,
            "ecc_if_on": self._ecc,
            "processes": self._processes,
            "bus": lambda gpu: str(smi.amdsmi_get_gpu_device_bdf(gpu)),
        }

    def open(self) -> None:
        """Connect to the driver, and find the serial numbers and PCI addresses of the GPUs."""
        smi = self.module
        smi.amdsmi_init()
        self._handles.clear()
        for gpu in smi.amdsmi_get_processor_handles():
            with suppress(*self.errors):
                serial = str(smi.amdsmi_get_gpu_asic_info(gpu)["asic_serial"]).lower()
                self._handles.setdefault(serial.removeprefix("0x"), []).append(gpu)
            with suppress(*self.errors):
                address = self.readings["bus"](gpu).lower().partition(".")[0]
                self._handles.setdefault(address, []).append(gpu)

    def find(self, identity: str) -> Any:
        """Return the GPU whose serial number is in the UUID, or else the one at the PCI address.

        The two dies of an MI250X have the serial number of their board
        (https://github.com/ROCm/rocm-systems/pull/3614), and the parts of a GPU its address.
        """
        uuid, _, address = identity.partition("@")
        for key in (_serial(uuid), address):
            if len(found := self._handles.get(key, [])) == 1:
                return found[0]
        raise NotTold("amdsmi does not know this GPU")

    def _driver(self, gpu: Any) -> str:
        with suppress(*self.errors):
            return str(self.module.amdsmi_get_gpu_driver_info(gpu)["driver_version"] or "unknown")
        return "unknown"

    def _memory(self, gpu: Any) -> tuple[int, ...]:
        found = self.module.amdsmi_get_gpu_vram_usage(gpu)
        return tuple(int(MIB * _number(found, key)) for key in ("vram_used", "vram_total"))

    def _power(self, gpu: Any) -> tuple[float, float | None]:
        info = self.module.amdsmi_get_power_info(gpu)
        # Of the two, each kind of GPU has one.
        kinds = "current_socket_power", "average_socket_power"
        watts = _known(info, kinds[0]) or _number(info, *kinds[::-1])
        limit = _known(info, "power_limit") or 0.0
        limit = limit * _MICRO if limit > 1e5 else limit  # some versions: microwatts
        return watts, limit if limit > 0 else None

    def _energy(self, gpu: Any) -> float:
        counted = self.module.amdsmi_get_energy_count(gpu)
        steps = _number(counted, "energy_accumulator", "power")
        return steps * _number(counted, "counter_resolution") * _MICRO

    def _heat(self, gpu: Any) -> float:
        """Return the temperature of the hottest place."""
        smi = self.module
        place, now = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        return float(smi.amdsmi_get_temp_metric(gpu, place, now))

    def _clocks(self, gpu: Any) -> Any:
        return self.module.amdsmi_get_clock_info(gpu, self.module.AmdSmiClkType.GFX)

    def _ecc(self, gpu: Any) -> tuple[int, ...]:
        counted = self.module.amdsmi_get_gpu_total_ecc_count(gpu)
        kinds = "correctable_count", "uncorrectable_count"
        return tuple(int(_number(counted, kind)) for kind in kinds)

    def _processes(self, gpu: Any) -> tuple[Any, ...]:
        memory: dict[int, int] = {}
        for each in self.module.amdsmi_get_gpu_process_list(gpu):
            used = int(_number(each.get("memory_usage", {}), "vram_mem"))
            if used:  # a process that only has the driver open computes nothing here
                memory[int(each["pid"])] = used
        return memory, *self._memory(gpu)


def _serial(uuid: str) -> str:
    """Return the serial number in a UUID as torch writes it: each byte is a letter.

    A UUID that has no such letters is returned as it is.
    """
    try:
        return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")).decode("ascii").lower()
    except ValueError:
        return uuid.lower()


def _known(values: Mapping[str, Any], key: str) -> float | None:
    """Return a number; None where amdsmi has N/A or does not know the key."""
    value = values.get(key)
    return float(value) if isinstance(value, (bool, int, float)) else None


def _number(values: Mapping[str, Any], *keys: str) -> float:
    """Return the number of the first of the keys that has one."""
    for key in keys:
        if (value := _known(values, key)) is not None:
            return value
    raise NotTold(f"{keys[0]} is {values.get(keys[0])}")
