"""What a GPU can compute: by NVIDIA's compute capability, or by the name of AMD's architecture.

On AMD's GPUs torch derives a capability from the architecture, and it says nothing: MI100, MI250X
and H100 all have 9.0.
"""

from __future__ import annotations

import torch

# The least compute capability.
_NVIDIA = {"tf32": (8, 0), "fp8": (8, 9), "flash": (8, 0)}
# Beginnings of architectures. fp8 and flash are those of torch 2.13's own tests (common_cuda.py);
# tf32 is in the matrix units of MI300 (AMD's table of precisions), and emulated on MI350
# (hipBLASLt of ROCm 7.0). What torch calls experimental is left out.
_AMD = {
    "tf32": ("gfx94", "gfx95"),
    "fp8": ("gfx94", "gfx95", "gfx120"),
    "flash": ("gfx90a", "gfx94", "gfx95", "gfx1100", "gfx1201"),
}


def can(what: str, gpu: torch.device) -> bool:
    """Return whether a GPU has "tf32", "fp8" or the "flash" kernel of attention."""
    if torch.version.hip:
        return _architecture(gpu).startswith(_AMD[what])
    return torch.cuda.get_device_capability(gpu) >= _NVIDIA[what]


def lack(what: str, device: torch.device) -> str:
    """Return what a device lacks, as it reads on from "it needs"; "" if it lacks nothing."""
    needed = "a GPU of compute capability {}.{} or newer".format(*_NVIDIA[what])
    if torch.version.hip:
        needed = f"a GPU of AMD's architectures {', '.join(_AMD[what])}"
    if device.type != "cuda":
        return f"{needed}, but this rank's device is a CPU"
    if can(what, device):
        return ""
    has = "{}.{}".format(*torch.cuda.get_device_capability(device))
    if torch.version.hip:
        has = _architecture(device)
    return f"{needed}; {torch.cuda.get_device_name(device)} has {has}"


def _architecture(gpu: torch.device) -> str:
    name: str = torch.cuda.get_device_properties(gpu).gcnArchName
    return name.partition(":")[0]  # gfx90a:sramecc+:xnack-
