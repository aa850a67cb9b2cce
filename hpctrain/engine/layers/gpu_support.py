"""What a GPU can compute: by NVIDIA's compute capability, or by the name of AMD's architecture.

On AMD's GPUs torch derives a capability from the architecture, and it says nothing: MI100, MI250X
and H100 all have 9.0.
"""

import torch

# The least capability, and beginnings of architectures. Those of fp8 and flash are from the tests
# of torch 2.13 (common_cuda.py). tf32 is in the matrix units of MI300 (AMD's table of precisions)
# and emulated on MI350 (hipBLASLt of ROCm 7.0). What torch calls experimental is left out.
_NEEDED = {
    "tf32": ((8, 0), ("gfx94", "gfx95")),
    "fp8": ((8, 9), ("gfx94", "gfx95", "gfx120")),
    "flash": ((8, 0), ("gfx90a", "gfx94", "gfx95", "gfx1100", "gfx1201")),
}


def can(what: str, gpu: torch.device) -> bool:
    """Return whether a GPU has "tf32", "fp8" or the "flash" kernel of attention."""
    least, architectures = _NEEDED[what]
    if torch.version.hip:
        return _architecture(gpu).startswith(architectures)
    return torch.cuda.get_device_capability(gpu) >= least


def lack(what: str, device: torch.device) -> str:
    """Return what a device lacks, as it reads on from "it needs"; "" if it lacks nothing."""
    hip, (least, architectures) = torch.version.hip, _NEEDED[what]
    needed = "a GPU of compute capability {}.{} or newer".format(*least)
    if hip:
        needed = f"a GPU of AMD's architectures {', '.join(architectures)}"
    if device.type != "cuda":
        return f"{needed}, but this rank's device is a CPU"
    if can(what, device):
        return ""
    capability = torch.cuda.get_device_capability(device)
    has = _architecture(device) if hip else "{}.{}".format(*capability)
    return f"{needed}; {torch.cuda.get_device_name(device)} has {has}"


def _architecture(gpu: torch.device) -> str:
    name: str = torch.cuda.get_device_properties(gpu).gcnArchName
    return name.partition(":")[0]  # gfx90a:sramecc+:xnack-
