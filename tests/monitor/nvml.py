"""Stand-ins for pynvml; there is no GPU here. A file of tests/corpus/nvml has the answers of one.

Player    what a file says, and nothing else: its handle is "gpu"
Nvml      the H100 of its file at work, whose answers a test changes. On the first, GPU-a, the job's
          processes run; GPU-b is another job's; MIG-c is the job's part of a third one
"""

import re
from types import SimpleNamespace
from typing import Any

import pynvml
import yaml

from tests.conftest import ROOT

FOLDER = ROOT / "tests" / "corpus" / "nvml"
KINDS = sorted(file.stem for file in FOLDER.glob("*.yaml"))
INVALID, NOT_SUPPORTED, NOT_FOUND, LOST = ({"error": number} for number in (2, 3, 6, 15))


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def load(name: str) -> dict[str, Any]:
    """Return a file: the answers by call, and the readings that they give."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    for call in [*found["answers"]]:
        if span := re.search(r"(\d+)\.\.(\d+)", call):
            answer, (first, last) = found["answers"].pop(call), map(int, span.groups())
            numbers = (call.replace(span[0], str(each)) for each in range(first, last + 1))
            found["answers"] |= dict.fromkeys(numbers, answer)
    return found


def call_of(name: str, arguments: tuple[Any, ...]) -> str:
    """Return a call as files have it; they have no identities of GPUs."""
    shown = (str(each) if isinstance(each, int) else "gpu" for each in arguments)
    return f"{name}({', '.join(shown)})"


class Player:
    """pynvml with the `answers` of a file; a function that it does not name is not there."""

    NVMLError = NVMLError

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return getattr(pynvml, name)
        if not any(call.partition("(")[0] == name for call in self.answers):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            found = self.answer(name, arguments)
            if isinstance(found, dict) and "error" in found:
                raise NVMLError(found["error"])
            return SimpleNamespace(**found) if isinstance(found, dict) else found

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return what is answered to a call."""
        found = self.answers.get(name, INVALID)
        return self.answers.get(call_of(name, arguments), found)


class Nvml(Player):
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
        super().__init__(load("h100.yaml")["answers"])
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

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return what is answered to a call, as the attributes are now."""
        if name in self.broken:
            return {"error": self.broken[name]}
        gpu, *more = arguments or ("",)
        if name == "nvmlDeviceGetHandleByUUID":
            return gpu if gpu in ("GPU-a", "GPU-b", "MIG-c") else NOT_FOUND
        if gpu:
            self.asked.add(gpu)
        if gpu in self.lost:
            return LOST
        if gpu.startswith("MIG"):
            assert name not in _OF_THE_WHOLE, "a MIG instance has no such sensor"
        changed = self._changed(gpu, *more)
        return changed[name] if name in changed else super().answer(name, arguments)

    def _changed(self, gpu: str, number: int = 0, _: int = 0) -> dict[str, Any]:
        part, errors = gpu.startswith("MIG"), dict(enumerate(self.ecc or ()))
        return {
            "nvmlDeviceIsMigDeviceHandle": part,
            "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3" + " MIG 1g.10gb" * part,
            "nvmlDeviceGetMemoryInfo": {"used": self.used, "total": 80_000_000_000},
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in self.processes
            ],
            "nvmlDeviceGetC2cModeInfoV": {"isC2cEnabled": self.c2c},
            "nvmlDeviceGetUtilizationRates": {"gpu": 87},
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
            "nvmlDeviceGetEccMode": NOT_SUPPORTED if self.ecc is None else [self.ecc_modes[0]] * 2,
            "nvmlDeviceGetDefaultEccMode": [self.ecc_modes[1]],
            "nvmlDeviceGetTotalEccErrors": errors.get(number, NOT_SUPPORTED),
            "nvmlDeviceGetRemappedRows": self.remapped,
            "nvmlDeviceGetNvLinkState": dict(enumerate(self.nvlinks)).get(number, INVALID),
        }


_OF_THE_WHOLE = {
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetComputeRunningProcesses",
}
