"""A data set of random samples, for `bench --sample-shape`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hpctrain.config.schema import Config, DataConfig
from hpctrain.job.building.instantiate import instantiate
from hpctrain.plan.inspecting.activations import activations_of
from hpctrain.plan.inspecting.model_facts import build_of
from hpctrain.plan.inspecting.sample_shape import of_shape, parse_shape
from hpctrain.shards.format import write_shards
from hpctrain.shards.sample_schema import ArrayBatch
from hpctrain.shards.types import Array

_ROWS = 64  # that are made at a time


def read_from(config: Config, shape: str, folder: Path) -> None:
    """Let a config read the data set, which has neither files to decode nor anything to choose.

    Raises:
        ConfigError: The model does not take such a sample.
    """
    task = instantiate("task", config.task)
    sample = of_shape(task, parse_shape(shape))
    activations_of(build_of(config), task, sample, None, config.train)  # which says what is wrong
    kept = {name: getattr(config.data, name) for name in ("batch_transforms", "threads", "tail")}
    config.data = replace(DataConfig(path=str(folder)), **kept)


def write(config: Config, shape: str, folder: Path) -> None:
    """Write the data set: floats of a normal distribution, and 0 and 1 as labels and tokens."""
    fields = of_shape(instantiate("task", config.task), parse_shape(shape))
    numbers = np.random.default_rng(config.seed)

    def values(field: torch.Tensor, rows: int) -> Array:
        size = (rows, *field.shape[1:])
        if field.dtype.is_floating_point:
            return numbers.standard_normal(size, dtype=np.float32)
        return numbers.integers(0, 2, size)

    def batches() -> Iterator[tuple[str, ArrayBatch]]:
        for split, count in (("train", 3 * config.train.global_batch_size // 2), ("val", 2)):
            for begin in range(0, count, _ROWS):
                rows = min(_ROWS, count - begin)
                yield (
                    split,
                    {
                        name: values(field, rows)
                        for name, field in fields.items()
                        if name != "mask" and not name.endswith("_document")
                    },
                )

    write_shards(folder, batches())
