"""The driver of this host's GPUs, and the build of torch that it can run.

/proc/driver/nvidia/version ──┐             ┌── a rank: no training on the CPU in silence
/dev/kfd (AMD)              ──┴── mismatch ─┴── `make`, which has no packages yet
"""

import re
import sys
from contextlib import suppress
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")
_AMD_VERSION = Path("/sys/module/amdgpu/version")  # only drivers of AMD's packages have it
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

# For each major version of CUDA its oldest driver (docs.nvidia.com/deploy/cuda-compatibility, minor
# version compatibility, November 2026), and an index of PyTorch with torch for it.
_CUDA = {13: (580, "cu130"), 12: (525, "cu126")}
_BLACKWELL = 570  # the oldest driver of these GPUs; the torch of cu126 has no code for them
_ROCM_INDEX = "rocm7.2"
_LEAST_SIMDS = 64  # the graphics of a processor have fewer; nobody expects to train on them


def nvidia() -> str | None:
    """Return the version of NVIDIA's driver, "" if it does not say it; None without the driver."""
    with suppress(OSError):
        # "… x86_64 Kernel Module  535.129.03 …", or "… Open Kernel Module for x86_64  580.65.06 …"
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", _NVIDIA.read_text())
        return found[1] if found else ""
    return None


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
    version = nvidia()
    if version is None and (hip or amd() is None):
        return ""
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    index, other, why = _ROCM_INDEX, "", ", but the GPUs are AMD's"
    if version is not None:
        has = _major(version) if version else max(oldest for oldest, _ in _CUDA.values())
        index = next((index for oldest, index in _CUDA.values() if has >= oldest), "")
        other = " (cu128 for Blackwell)" if _BLACKWELL <= has < _CUDA[13][0] else ""
        why = ", but the GPUs are NVIDIA's"
        if cuda:
            needed = _CUDA.get(_major(cuda), (0, ""))[0]
            if has >= needed:
                return ""
            why = f", which needs driver {needed} or newer, not {version}"
    cure = f"`make TORCH_INDEX={index}`{other} installs one for this driver (docs/gpu.md)"
    return f"torch {torch} is built for {built}{why}; {cure if index else 'update the driver'}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def advice(index: str) -> str:
    """Return what to know before torch is installed from an index of PyTorch; "" if it fits.

    The index is one such as `cu126`, or `pypi`, whose builds are for CUDA 13 since torch 2.11.
    """
    of = re.fullmatch(r"pypi|cu(\d\d)(\d)|rocm([\d.]+)", index)
    if of is None:
        return ""
    cuda = f"{of[1]}.{of[2]}" if of[1] else None if of[3] else "13"
    found = mismatch(f"of TORCH_INDEX={index}", cuda, of[3])
    return f"this host has {driver()}: {found}" if found else ""


if __name__ == "__main__":
    if said := advice(sys.argv[1]):
        print(f"*** {said}")
