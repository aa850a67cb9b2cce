"""A data set of random samples, for `bench --sample-shape`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.config.schema import DataConfig, TrainConfig
from hpctrain.plan.inspecting.activations import Measured
from hpctrain.plan.inspecting.sample_shape import of_shape, parse_shape
from hpctrain.shards.format import write_shards
from hpctrain.shards.sample_schema import ArrayBatch
from hpctrain.shards.types import Array

_ROWS = 64  # that are made at a time


def reading(data: DataConfig, folder: Path) -> DataConfig:
    """Return a section that reads the data set: nothing is decoded, and there is no choice."""
    kept = {name: getattr(data, name) for name in ("batch_transforms", "threads", "tail")}
    return replace(DataConfig(path=str(folder)), **kept)


def check(task: Any, build: Callable[[], nn.Module], train: TrainConfig, shape: str) -> None:
    """Raise a ConfigError if the model does not take such a sample."""
    sample = of_shape(task, parse_shape(shape))
    assert Measured(build, task, sample, None, train)[train.activation_checkpointing]


def write(task: Any, seed: int, batch: int, shape: str, folder: Path) -> None:
    """Write the data set: floats of a normal distribution, and 0 and 1 as labels and tokens."""
    fields = of_shape(task, parse_shape(shape))
    numbers = np.random.default_rng(seed)

    def values(field: torch.Tensor, rows: int) -> Array:
        size = (rows, *field.shape[1:])
        if field.dtype.is_floating_point:
            return numbers.standard_normal(size, dtype=np.float32)
        return numbers.integers(0, 2, size)

    def batches() -> Iterator[tuple[str, ArrayBatch]]:
        for split, count in (("train", 3 * batch // 2), ("val", 2)):
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
