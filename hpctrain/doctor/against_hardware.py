"""What was found and measured of a GPU against its file in `conf/hardware`.

A large matrix product reaches some 70% of the peak, a copy 80% of the bandwidth of the memory or
of PCIe, and an all-reduce 80% of the links. Nothing is said of a GPU that no file describes.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.doctor.finding import Finding, bounded
from hpctrain.doctor.probe import Probe
from hpctrain.hardware import Hardware, of_device, of_section

_of_device = functools.cache(of_device)  # it reads all files
_ALL_REDUCE, _IN_NODE = (f"all_reduce{x}_268435456_bus_gb_s" for x in ("", "_in_node"))  # 256 MiB
_POWER = "The GPU is slower than others of its kind: ask the administrators whether that is wanted."
_PCIE = (
    "The slot or the processor has an older PCIe, or lanes are lost: compare with another node, "
    "and expect slower copies to the GPU."
)
_SLOW = "Look for heat, a power limit or other processes, and compare with another node."
_NETWORK = (
    "See whether NCCL uses InfiniBand (NCCL_DEBUG=INFO says NET/IB, or NET/Socket where libibverbs "
    "is missing), and choose the network by network.interface."
)
_INSIDE = "Look at NVLink (`nvidia-smi nvlink -s`) and at NCCL_P2P_DISABLE and the like."
_NVLINK = (
    "Ask the administrators to look at the fabric manager (`systemctl status "
    "nvidia-fabricmanager`): the GPUs of the node communicate slowly."
)


def compared(looks: Sequence[Probe], section: Mapping[str, Any]) -> Iterator[tuple[str, Finding]]:
    """Yield what is far below the figures of the hardware, with the host.

    The section `hardware` of the config counts for the GPUs that it names.
    """
    nodes = len({each.host for each in looks})
    given = of_section(section) if section else None
    for each in looks:
        if not each.gpus:
            continue
        gpu = each.gpus[0]
        own = given is not None and gpu.name in given.devices
        hardware = given if own else _of_device(gpu.name, gpu.memory_bytes)
        if hardware is not None:
            for finding in _of_rank(each, hardware, nodes):
                yield each.host, finding


def _of_rank(each: Probe, hardware: Hardware, nodes: int) -> Iterator[Finding]:
    figures, gpu, rank, title = each.figures, each.gpus[0], f"rank {each.rank}: ", hardware.title
    pairs = [value / 1e3 for name, value in figures.items() if name.startswith("pair_")]
    shared = figures.get(_IN_NODE if nodes > 1 else _ALL_REDUCE) if each.local_rank == 0 else None
    peak, flops, loaded = hardware.peak("bf16"), "TFLOP/s", figures.get("to_gpu_gb_s")
    # Boards for several cards that have no other link give each half of the lanes, by design.
    kinds = f"{hardware.inside.kind} {hardware.host.kind}"
    lanes = 1.0 if re.search("NVLink|Infinity", kinds) else 0.5
    pcie = gpu.pcie_gb_s if hardware.host.kind.startswith("PCIe") else None
    best = {
        name: None if link is None else link / 1e9
        for name, link in (
            ("memory", hardware.memory_bandwidth),
            ("host", hardware.host.bandwidth),
            ("inside", hardware.inside.bandwidth),
            ("between", hardware.between.bandwidth),
        )
    }
    # What is judged, its value, what the hardware has, the part of it that is expected, the unit.
    rows = [
        (f"{rank}power limit", gpu.power_w, hardware.power_w, 0.9, "W", _POWER),
        (f"{rank}PCIe", pcie, best["host"], 0.9 * lanes, "GB/s", _PCIE),
        (f"{rank}matmul", figures.get("matmul_tflops"), peak and peak / 1e12, 0.5, flops, _SLOW),
        (f"{rank}memory", figures.get("memory_gb_s"), best["memory"], 0.6, "GB/s", _SLOW),
        (f"{rank}PCIe under load", loaded, best["host"], 0.5 * lanes, "GB/s", _SLOW),
        ("network", max(pairs, default=None), best["between"], 0.5, "GB/s", _NETWORK),
        ("all-reduce", shared, best["inside"], 0.5, "GB/s (bus)", _INSIDE),
    ]
    findings = [_judged(*row, title) for row in rows]
    if gpu.nvlinks == 0 and "NVLink" in hardware.inside.kind:
        found, expected = "no NVLink is up", f"{hardware.inside.kind} ({title})"
        check = f"{rank}NVLink against the hardware"
        findings.insert(2, Finding(check, "warn", found, expected, _NVLINK))
    yield from filter(None, findings)


def _judged(
    check: str,
    value: float | None,
    most: float | None,
    part: float,
    unit: str,
    cure: str,
    title: str,
) -> Finding | None:
    if value is None or most is None:
        return None
    return bounded(
        check if unit == "W" else f"{check} against the hardware",
        value,
        f"{value:.4g} {unit}",
        warn_below=part * most,
        expected=f"at least {part * most:.4g}, {part:.0%} of {most:.4g} ({title})",
        cure=cure,
    )
