"""What each rank of a check does: look, meet the others, measure.

`probe` needs no other rank, so that its findings are there even if the ranks cannot meet.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpctrain.base.errors import HpctrainError
from hpctrain.base.files.record import convert
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.insight.doctor.checks import network
from hpctrain.insight.doctor.finding import bad
from hpctrain.insight.doctor.probe import Expectation, Probe, probe

_TIMEOUT_S = 60
# The job of a function has these for torch; the launcher's own variables tell more.
_OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def check(asked: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return what this rank of `doctor --nodes` has seen and measured, as JSON.

    `asked` is an `Expectation` as JSON. The folder keeps the secret by which the ranks meet.
    """
    given = convert(Expectation, asked, "what is asked of a node")
    ranks = RankInfo.from_env({k: v for k, v in os.environ.items() if k not in _OF_TORCH})
    import torch

    uuids = visible_gpus(given.parallel.device)
    seen = probe(given, ranks, uuids, disks=True)
    if ranks.local_rank == 0:
        seen.versions["cuda"] = str(torch.version.cuda or torch.version.hip or "none")
        if torch.cuda.is_available():
            seen.versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if ranks.is_main and ranks.world_size > 1:
        free = network.port(ranks.master_addr, ranks.master_port, ranks.one_node)
        seen.findings.append(free)
        if free.result == "fail":
            return asdict(seen)
    return asdict(_measured(given, ranks, Path(folder), seen))


def visible_gpus(device: str) -> list[str]:
    """Return the identities of the GPUs that torch sees; none if `parallel.device` is cpu."""
    import torch

    from hpctrain.engine.distributed import devices

    gpus = device != "cpu" and torch.cuda.is_available()
    return devices.visible("cuda" if gpus else "cpu")


def _measured(asked: Expectation, ranks: RankInfo, folder: Path, seen: Probe) -> Probe:
    from hpctrain.engine.distributed.group import process_group

    parallel = replace(asked.parallel, timeout_s=_TIMEOUT_S)
    launch = replace(asked.launch, gpus_per_run=None)
    try:
        with process_group(ranks, parallel, launch, folder) as device:
            return measured(ranks, device, seen)
    except (HpctrainError, RuntimeError) as error:
        seen.findings.append(bad("communication", "fail", " ".join(str(error).split())[:300]))
        return seen


def measured(ranks: RankInfo, device: Any, seen: Probe) -> Probe:
    """Measure with all ranks of the process group, and return the look with the figures."""
    import torch.distributed as dist

    from hpctrain.insight.doctor.measures import speeds

    figures = seen.figures
    # One rank of the node after the other: on CPUs they would share caches and memory.
    figures |= _in_turn(ranks, lambda: speeds.of_rank(device))
    if ranks.world_size > 1:
        figures |= {f"all_reduce_{k}": v for k, v in speeds.of_all_reduce(device).items()}
    if 1 < ranks.local_world_size < ranks.world_size:
        own, _ = dist.new_subgroups(ranks.local_world_size)
        inside = speeds.of_all_reduce(device, own)
        figures |= {f"all_reduce_in_node_{name}": value for name, value in inside.items()}
    if ranks.num_nodes > 1:
        found = speeds.of_pairs(device, ranks)
        figures |= {f"pair_{node}_mb_s": value for node, value in found.items()}
    return seen


def _in_turn(ranks: RankInfo, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    import torch.distributed as dist

    found: dict[str, float] = {}
    for turn in range(ranks.local_world_size):
        if turn == ranks.local_rank:
            found = work()
        dist.barrier()
    return found
