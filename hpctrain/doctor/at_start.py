"""The checks at the start of a job, inside its ranks, before they train."""

from __future__ import annotations

import torch

from hpctrain.distributed import objects
from hpctrain.distributed.ranks import RankInfo
from hpctrain.doctor import comparison, node_job
from hpctrain.doctor.comparison import Places
from hpctrain.doctor.look import Asked, Look, look


def checked(
    asked: Asked, ranks: RankInfo, device: torch.device, *, full: bool
) -> tuple[Places, dict[str, dict[str, float]]]:
    """Return what is found on each host, and what was measured; all ranks call it.

    Args:
        asked: What the job asks for.
        ranks: The rank.
        device: Its device.
        full: Whether the speed of GPUs, links and the data is measured.
    """
    seen = look(asked, ranks, node_job.visible_gpus(asked), disks=full)
    seen = node_job.measured(asked, ranks, device, seen) if full else node_job.meet(seen)
    looks = [Look.of_json(each) for each in objects.all_gather(seen.to_json())]
    return comparison.compared(looks, mixed=asked.mixed), comparison.figures(looks)
