"""The recipe of parallelism: one ordered function from a plain model to the one that is trained.

Today: data parallel (DDP). The order for what follows: tensor parallel, activation checkpointing,
compile, sharding or DDP, pipeline.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.distributed.ranks import RankInfo


def parallelize(model: nn.Module, ranks: RankInfo, device: torch.device) -> nn.Module:
    """Place the model and make its gradients the mean over the data-parallel ranks.

    Args:
        model: built alike (same seed) on every rank.
        ranks: this process's place.
        device: of this rank.
    """
    model = model.to(device)
    if ranks.world_size == 1:
        return model
    device_ids = [device.index] if device.type == "cuda" else None
    # The buckets hold the gradients themselves: one copy less a step, and no memory for two.
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
