"""What was found and measured of a GPU against its file in `conf/hardware`.

A large matrix product reaches some 70% of the peak, a copy 80% of the bandwidth of the memory or
of PCIe, and an all-reduce 80% of the links. Nothing is said of a GPU that no file describes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from hpctrain.doctor.finding import Finding, bounded
from hpctrain.doctor.look import Look
from hpctrain.hardware import Hardware, of_device

_of_device = functools.cache(of_device)  # it reads all files
_PART_OF_POWER, _PART_OF_PEAK, _PART_OF_MEMORY, _PART_OF_LINKS = 0.9, 0.5, 0.6, 0.5
_PART_OF_PCIE = 0.9
_ALL_REDUCE = "all_reduce_268435456_bus_gb_s"  # 256 MiB
_CURE = "Look for heat, a power limit or other processes, and compare with another node."


def compared(looks: Sequence[Look]) -> Iterator[tuple[str, Finding]]:
    """Yield what is far below the figures of the hardware, with the host."""
    nodes = len({each.host for each in looks})
    for each in looks:
        hardware = _of_device(each.gpus[0].name, each.gpus[0].memory_bytes) if each.gpus else None
        if hardware is not None:
            for finding in _of_rank(each, hardware, nodes):
                yield each.host, finding


def _of_rank(each: Look, hardware: Hardware, nodes: int) -> Iterator[Finding]:
    figures, title = each.figures, hardware.title
    power = each.gpus[0].power_w
    if power is not None and hardware.power_w is not None:
        yield bounded(
            f"rank {each.rank}: power limit",
            power,
            f"{power:.0f} W",
            warn_below=_PART_OF_POWER * hardware.power_w,
            expected=f"{hardware.power_w:.0f} W ({title})",
            cure="The GPU is slower than others of its kind: ask the administrators whether that "
            "is wanted.",
        )
    yield from _links(each, hardware)
    in_node = figures.get(f"all_reduce_in_node{_ALL_REDUCE[len('all_reduce') :]}")
    rows = [
        ("matmul", "matmul_tflops", 1e12, hardware.peak("bf16"), _PART_OF_PEAK),
        ("memory", "memory_gb_s", 1e9, hardware.memory_bandwidth, _PART_OF_MEMORY),
        ("PCIe under load", "to_gpu_gb_s", 1e9, hardware.host.bandwidth, _PART_OF_LINKS),
    ]
    for what, name, unit, best, part in rows:
        value = figures.get(name)
        if value is not None and best is not None:
            yield bounded(
                f"rank {each.rank}: {what} against the hardware",
                unit * value,
                f"{value:.4g} {_unit(name)}",
                warn_below=part * best,
                expected=f"at least {part * best / unit:.4g}, {part:.0%} of the peak ({title})",
                cure=_CURE,
            )
    pairs = [value for name, value in figures.items() if name.startswith("pair_")]
    if pairs and (best := hardware.between.bandwidth) is not None:
        yield bounded(
            "network against the hardware",
            1e6 * max(pairs),
            f"{max(pairs) / 1e3:.4g} GB/s with its best partner",
            warn_below=_PART_OF_LINKS * best,
            expected=f"at least {_PART_OF_LINKS * best / 1e9:.4g} GB/s, half of "
            f"{hardware.between.kind} ({title})",
            cure="See whether NCCL uses InfiniBand (NCCL_DEBUG=INFO says NET/IB, or NET/Socket "
            "where libibverbs is missing), and choose the network by network.interface.",
        )
    value = in_node if nodes > 1 else figures.get(_ALL_REDUCE)
    best = hardware.inside.bandwidth
    if value is not None and best is not None and each.local_rank == 0:
        yield bounded(
            "all-reduce against the hardware",
            1e9 * value,
            f"{value:.4g} GB/s (bus) inside the node",
            warn_below=_PART_OF_LINKS * best,
            expected=f"at least {_PART_OF_LINKS * best / 1e9:.4g} GB/s ({title})",
            cure="Look at NVLink (`nvidia-smi nvlink -s`) and at NCCL_P2P_DISABLE and the like.",
        )


def _links(each: Look, hardware: Hardware) -> Iterator[Finding]:
    """Judge the links that the GPU has; PCIe by the bandwidth that generation and lanes allow."""
    gpu, title = each.gpus[0], hardware.title
    if gpu.pcie_gb_s is not None and hardware.host.bandwidth is not None:
        best = hardware.host.bandwidth / 1e9
        yield bounded(
            f"rank {each.rank}: PCIe against the hardware",
            gpu.pcie_gb_s,
            f"{gpu.pcie_gb_s:.0f} GB/s",
            warn_below=_PART_OF_PCIE * best,
            expected=f"{best:.0f} GB/s, {hardware.host.kind} ({title})",
            cure="The slot or the processor has an older PCIe, or lanes are lost: compare with "
            "another node, and expect slower copies to the GPU.",
        )
    if gpu.nvlinks == 0 and "NVLink" in hardware.inside.kind:
        yield Finding(
            f"rank {each.rank}: NVLink against the hardware",
            "warn",
            "no NVLink is up",
            f"{hardware.inside.kind} ({title})",
            "Ask the administrators to look at the fabric manager "
            "(`systemctl status nvidia-fabricmanager`): the GPUs of the node communicate slowly.",
        )


def _unit(name: str) -> str:
    return "TFLOP/s" if name.endswith("tflops") else "GB/s"
