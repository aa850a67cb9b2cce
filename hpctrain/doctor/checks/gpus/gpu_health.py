"""The health of the job's GPUs.

    uuids ── NvidiaHealth, by NVML ──┐
             AmdHealth, by amdsmi  ──┴── GpuFacts, which are compared over all ranks
                                     └── findings: errors and pages of memory, throttling, power,
                                                   others' processes, links, NUMA

Nothing needs root. What a GPU does not tell is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.doctor.checks.gpus.amd_health import AmdHealth
from hpctrain.doctor.checks.gpus.gpu_facts import GpuFacts
from hpctrain.doctor.checks.gpus.nvidia_health import NvidiaHealth
from hpctrain.doctor.finding import Finding, unknown
from hpctrain.monitor import amd

_KFD = Path("/dev/kfd")
_RELOAD = "Ask the administrators to reload the driver of this node (`{}` tells more)."


def checked(
    uuids: Sequence[str], nvml: Any = None, first: int = 0, smi: Any = None
) -> tuple[list[GpuFacts], list[Finding]]:
    """Return the facts of those GPUs that answer, and what was found.

    `first` is the number of the first of them in the table. `nvml` is `pynvml`, and `smi` is
    `amdsmi` for AMD's GPUs, or a module with the same functions.
    """
    if not uuids:
        return [], []
    labels = {f"GPU {number}": uuid for number, uuid in enumerate(uuids, first)}
    if smi is not None or (nvml is None and (amd.is_here() or _has_rocm())):
        return _amd(labels, smi)
    return _nvidia(labels, nvml)


def _has_rocm() -> bool:
    """Return whether the kernel has AMD's driver and not NVIDIA's; amdsmi may be missing."""
    return _KFD.exists() and not Path("/proc/driver/nvidia").exists()


def _nvidia(labels: dict[str, str], nvml: Any) -> tuple[list[GpuFacts], list[Finding]]:
    if nvml is None:
        try:
            import pynvml as nvml  # type: ignore[no-redef]
        except ImportError:
            cure = "Install nvidia-ml-py."
            return [], [unknown("GPUs", "the package nvidia-ml-py is not installed", cure)]
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        cure = _RELOAD.format("nvidia-smi")
        return [], [Finding("GPUs", "fail", f"NVML: {error}", "the driver answers", cure)]
    each = [NvidiaHealth(nvml, label, uuid) for label, uuid in labels.items()]
    return _of_all(each, (nvml.NVMLError,))


def _amd(labels: dict[str, str], smi: Any) -> tuple[list[GpuFacts], list[Finding]]:
    if smi is None:
        try:
            import amdsmi as smi  # type: ignore[import-not-found, no-redef, unused-ignore]
        except (ImportError, OSError, KeyError) as error:  # the package without ROCm's library
            return [], [unknown("GPUs", f"amdsmi cannot be imported: {error}")]
    try:
        smi.amdsmi_init()
        there = amd.handles(smi)
    except smi.AmdSmiException as error:
        cure = _RELOAD.format("amd-smi")
        return [], [Finding("GPUs", "fail", f"amdsmi: {error}", "the driver answers", cure)]
    each = [
        AmdHealth(smi, label, uuid, there.get(amd.serial(uuid))) for label, uuid in labels.items()
    ]
    return _of_all(each, (smi.AmdSmiException, LookupError))


def _of_all(
    gpus: Sequence[NvidiaHealth | AmdHealth], errors: tuple[type[Exception], ...]
) -> tuple[list[GpuFacts], list[Finding]]:
    facts: list[GpuFacts] = []
    findings: list[Finding] = []
    for one in gpus:
        try:
            facts.append(one.facts())
        except errors as error:
            cure = "Ask the administrators to drain the node: the GPU has fallen off the bus."
            found = f"{one.uuid}: {error}"
            findings.append(Finding(one.label, "fail", found, "an answer", cure))
            continue
        findings += one.findings()
    return facts, findings
