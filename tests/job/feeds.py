"""The feeds of one rank, and what they give."""

from collections.abc import Callable
from typing import Any

import torch

from hpctrain.config.rules.batch_sizes import ramp_of
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.engine.building.build_data import DataBuilder
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.runs.freeze import check

Build = Callable[..., DataBuilder]


def builder(config: Callable[..., Config]) -> Build:
    """Return a function that makes the `DataBuilder` of one rank from a checked config."""

    def call(*overrides: str, rank: int = 0, size: int = 1) -> DataBuilder:
        made = config(*overrides)
        check(made, size)
        mesh = Mesh(Degrees(size), rank, torch.device("cpu"))
        return DataBuilder(made.data, ramp_of(made.train), made.seed, mesh, cores=1)

    return call


def epoch(feed: DevicePrefetcher | None) -> list[dict[str, torch.Tensor]]:
    """Return the batches of an epoch, and close the feed."""
    assert feed is not None
    batches = []
    try:
        for batch in feed:
            batches.append({name: value.clone() for name, value in batch.items()})
            if feed.epoch:
                break
    finally:
        feed.close()
    return batches


def values(batches: list[dict[str, torch.Tensor]], field: str) -> list[Any]:
    """Return a field of all samples of batches."""
    return [value for batch in batches for value in batch[field][batch["mask"]].tolist()]
