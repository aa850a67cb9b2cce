"""The recipe of parallelism: one function turns the plain model into the model that is trained.

It knows data parallel training (DDP) so far.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.distributed.ranks import RankInfo


def parallelize(model: nn.Module, ranks: RankInfo, device: torch.device) -> nn.Module:
    """Move the model to the device, and average its gradients over the data-parallel ranks.

    Args:
        model: The model, built with the same seed on every rank.
        ranks: The rank of this process and the number of ranks.
        device: Device of this rank.
    """
    model = model.to(device)
    if ranks.world_size == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    # Gradients that are views of the buckets save a copy per step and the memory for it.
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
