"""What a run trains with on this host: versions of libraries, drivers and Slurm, and the image.

It is recorded with each attempt, so that a difference between two of them is seen. The monitor of
each node records the GPUs, the driver and the kernel of its own node.
"""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress

import torch

from hpctrain import __version__, gpu_driver
from hpctrain.slurm.queue import call, version


def environment(image: str | None = None) -> dict[str, str]:
    """Return the facts by name; what is not there has no name.

    The image is that of the config; None looks whether this process is in a container.
    """
    found = {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "cudnn": _version_of(torch.backends.cudnn.version()) if torch.version.cuda else "",
        "nccl": _nccl(),
        "kernel": platform.release(),
        "driver": gpu_driver.nvidia() or gpu_driver.amd() or "",
        "slurm": _slurm() if "SLURM_JOB_ID" in os.environ else "",
        "image": image or _image(),
    }
    return {name: value for name, value in found.items() if value}


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two attempts: `driver 550.90 -> 570.1`."""
    return [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _nccl() -> str:
    if not torch.version.cuda:
        return ""
    with suppress(Exception):  # a build without NCCL
        return ".".join(map(str, torch.cuda.nccl.version()))
    return ""


def _version_of(number: int | None) -> str:
    """Return cuDNN's version: 90100 is 9.1.0, and before version 9 8902 was 8.9.2."""
    if number is None:
        return ""
    major = number // 10_000 if number >= 90_000 else number // 1000
    rest = number - major * (10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _slurm() -> str:
    with suppress(OSError, subprocess.TimeoutExpired):  # in a container there is no srun
        return version(call("srun", "--version", timeout_s=5).stdout).partition(" ")[2]
    return ""


def _image() -> str:
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_IMAGE"):
        if found := os.environ.get(name):
            return found
    return ""
