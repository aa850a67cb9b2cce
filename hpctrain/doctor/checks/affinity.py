"""The cores that a rank may use, against what was asked for and against the place of its GPU."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.distributed.cores import cores
from hpctrain.doctor.finding import Finding, judged, unknown
from hpctrain.monitor.cgroup import cpu_list

_DEVICES = Path("/sys/bus/pci/devices")


def checked(cpus_per_task: int) -> Finding:
    """Check the cores of this process."""
    return enough(len(os.sched_getaffinity(0)), cores(), cpus_per_task)


def enough(cpus: int, real: int, asked: int) -> Finding:
    """Judge the CPUs that a rank may use against `launch.cpus_per_task`; `real` are its cores."""
    return judged(
        "CPU cores",
        cpus >= asked,
        f"{cpus} CPUs, {real} cores",
        f"{asked} (launch.cpus_per_task)",
        "Unset SLURM_CPU_BIND in your shell and set site.cpu_bind=cores, so that srun gives each "
        "rank its own.",
        "fail",
    )


def near_gpu(check: str, bus_id: str, cpus: set[int], devices: Path = _DEVICES) -> Finding:
    """Check that a rank with these CPUs may run on the socket to which its GPU is attached.

    The address is that of PCI as NVML writes it: `00000000:17:00.0`.
    """
    name = bus_id.lower()[-12:]  # the kernel writes a domain of 4 digits
    try:
        local = cpu_list((devices / name / "local_cpulist").read_text().strip())
    except (OSError, ValueError):
        return unknown(check, "the kernel does not tell which cores are near")
    near = len(cpus & local)
    return judged(
        check,
        bool(near) or not local,
        f"{near} of {len(cpus)} CPUs are near",
        "CPUs of the same socket",
        "Set site.distribution=block:block and site.cpu_bind=cores.",
    )
