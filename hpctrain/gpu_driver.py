"""The driver of this host's GPUs, and the build of torch that it can run.

    /proc/driver/nvidia/version ──┐             ┌── a rank: no training on the CPU in silence
    /dev/kfd (AMD)              ──┴── mismatch ─┴── `make`: a word before it installs torch

`make` runs this file when no package is installed yet, so it imports none.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")
_AMD_VERSION = Path("/sys/module/amdgpu/version")  # only drivers of AMD's packages have it
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

# The oldest driver for each major version of CUDA (docs.nvidia.com/deploy/cuda-compatibility, minor
# version compatibility, November 2026), and an index of PyTorch with torch 2.10 to 2.13 for it.
_OLDEST = {13: 580, 12: 525}
_INDEX = {13: "cu130", 12: "cu126"}
_ROCM_INDEX = "rocm7.2"
# The graphics of a processor have fewer SIMDs; nobody installs a torch for them, nor expects one.
_LEAST_SIMDS = 64


def nvidia() -> str | None:
    """Return the version of NVIDIA's driver, "" if it does not say it; None without the driver."""
    try:
        text = _NVIDIA.read_text()
    except OSError:
        return None
    # "… x86_64 Kernel Module  535.129.03  …", or "… Open Kernel Module for x86_64  580.65.06  …"
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", text)
    return found[1] if found else ""


def amd() -> str | None:
    """Return the version of AMD's driver, "" if it does not say it; None without a GPU of it."""
    if not _AMD.exists():
        return None
    simds = []
    for file in _AMD_NODES.glob("*/properties"):
        with suppress(OSError):
            simds += re.findall(r"^simd_count (\d+)$", file.read_text(), re.M)
    if simds and max(map(int, simds)) < _LEAST_SIMDS:
        return None
    with suppress(OSError):
        return _AMD_VERSION.read_text().strip()
    return ""


def driver() -> str:
    """Return whose driver this host has, with its version; "" if it has none."""
    for maker, version in (("NVIDIA", nvidia()), ("AMD", amd())):
        if version is not None:
            return f"{maker}'s driver {version}".strip()
    return ""


def mismatch(torch: str, cuda: str | None, hip: str | None) -> str:
    """Return why the driver of this host cannot run a build of torch, and the cure.

    "" if it can, or if there is no driver. `cuda` and `hip` are the versions for which this version
    of torch is built; a build for CPUs has neither.
    """
    if not driver():
        return ""
    version = nvidia()
    built = f"torch {torch} is built for "
    if version is None:
        return "" if hip else f"{built}{_platform(cuda, None)}, but the GPUs are AMD's{_cure()}"
    if cuda is None:
        return f"{built}{_platform(None, hip)}, but the GPUs are NVIDIA's{_cure()}"
    needed = _OLDEST.get(_major(cuda), 0)
    if not version or _major(version) >= needed:
        return ""
    return f"{built}CUDA {cuda}, which needs driver {needed} or newer, not {version}{_cure()}"


def _platform(cuda: str | None, hip: str | None) -> str:
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"


def _cure() -> str:
    if index := _fitting_index():
        return f"; `make TORCH_INDEX={index}` installs one for this driver (docs/gpu.md)"
    return f"; no torch for a driver older than {min(_OLDEST.values())} is supported: update it"


def _fitting_index() -> str:
    """Return the index of PyTorch whose builds the driver of this host can run; "" if none is."""
    version = nvidia()
    if version is None:
        return _ROCM_INDEX if amd() is not None else ""
    fits = (cuda for cuda, oldest in _OLDEST.items() if not version or _major(version) >= oldest)
    return _INDEX.get(next(fits, 0), "")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def advice(index: str) -> str:
    """Return what to know before torch is installed from an index of PyTorch; "" if it fits.

    The index is one such as `cu126`, or `pypi`, whose builds are for CUDA 13 since torch 2.11.
    """
    if index == "cpu":
        return ""
    hip = index.removeprefix("rocm") if index.startswith("rocm") else None
    digits = index.removeprefix("cu") if re.fullmatch(r"cu\d{3}", index) else ""
    cuda = f"{digits[:-1]}.{digits[-1]}" if digits else "13" if index == "pypi" else None
    found = mismatch(f"of TORCH_INDEX={index}", cuda, hip)
    return f"this host has {driver()}: {found}" if found else ""


if __name__ == "__main__":
    if said := advice(sys.argv[1]):
        print(f"*** {said}")
