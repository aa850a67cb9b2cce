"""What was measured of GPUs and links against the file of the hardware in `conf/hardware`.

A large matrix product reaches some 70% of the peak, a copy 80% of the bandwidth of the memory or
of PCIe, and an all-reduce 80% of the links. Nothing is said of a GPU that no file describes.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpctrain.doctor.finding import Finding, bounded
from hpctrain.doctor.probe import Probe
from hpctrain.hardware import of_device, of_section

_of_device = functools.cache(of_device)  # it reads all files
_ALL_REDUCE, _IN_NODE = (f"all_reduce{x}_268435456_bus_gb_s" for x in ("", "_in_node"))  # 256 MiB
_SLOW = "Look for heat, a power limit or other processes, and compare with another node."
_NETWORK = (
    "See whether NCCL uses InfiniBand (NCCL_DEBUG=INFO says NET/IB, or NET/Socket where libibverbs "
    "is missing), and choose the network by network.interface."
)
_INSIDE = "Look at NVLink (`nvidia-smi nvlink -s`) and at NCCL_P2P_DISABLE and the like."


def compared(looks: Sequence[Probe], section: Mapping[str, Any]) -> Iterator[tuple[str, Finding]]:
    """Yield what is far below the figures of the hardware, with the host.

    The section `hardware` of the config counts for the GPUs that it names.
    """
    nodes = len({each.host for each in looks})
    given = of_section(section) if section else None
    for each in (each for each in looks if each.gpus):
        gpu, figures = each.gpus[0], each.figures
        own = given is not None and gpu.name in given.devices
        hardware = given if own else _of_device(gpu.name, gpu.memory_bytes)
        if hardware is None:
            continue
        pairs = [value / 1e3 for name, value in figures.items() if name.startswith("pair_")]
        of_node = _IN_NODE if nodes > 1 else _ALL_REDUCE
        inside = figures.get(of_node) if each.local_rank == 0 else None
        # Boards for several cards that have no other link give each half of the lanes, by design.
        kinds = f"{hardware.inside.kind} {hardware.host.kind}"
        lanes = 0.5 if re.search("NVLink|Infinity", kinds) else 0.25
        peak, rank = hardware.peak("bf16"), f"rank {each.rank}: "
        host, between = hardware.host.bandwidth, hardware.between.bandwidth
        # What is judged, its value and what the hardware has in 1e9/s, and the part expected.
        rows = (
            (f"{rank}matmul", 1e3 * figures.get("matmul_tflops", 0), peak, 0.5, _SLOW),
            (f"{rank}memory", figures.get("memory_gb_s"), hardware.memory_bandwidth, 0.6, _SLOW),
            (f"{rank}PCIe under load", figures.get("to_gpu_gb_s"), host, lanes, _SLOW),
            ("network", max(pairs, default=None), between, 0.5, _NETWORK),
            ("all-reduce", inside, hardware.inside.bandwidth, 0.5, _INSIDE),
        )
        for check, value, most, part, cure in rows:
            if value and most is not None:
                yield (
                    each.host,
                    bounded(
                        f"{check} against the hardware",
                        value,
                        f"{value:,.4g} x 1e9/s",
                        warn_below=part * most / 1e9,
                        expected=f"{part:.0%} of {most / 1e9:,.4g} ({hardware.title})",
                        cure=cure,
                    ),
                )
