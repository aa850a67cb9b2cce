"""What a model takes for one sample, made as in an evaluation.

sample ── data.val_transforms ── a batch of one ── data.val_batch_transforms ── task.inputs
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import DataConfig, PrecisionConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.places.placement import load_index
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.ragged import Ragged
from hpctrain.data.shards.types import Array, Int64s
from hpctrain.data.source import Source
from hpctrain.data.transforms import Compose, bind
from hpctrain.data.workers.pool import Workers
from hpctrain.data.workers.samples import OneByOne
from hpctrain.engine.building.evaluation_transforms import EvaluationTransforms
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.parallel.precision import default_dtype, wide_batch
from hpctrain.engine.tasks.task import SplitTask
from hpctrain.engine.tasks.task import bind as bind_task


class _Alone(Source):
    """A source of one sample; the fields of these names vary in length."""

    def __init__(self, sample: Mapping[str, Any], variable: set[str]) -> None:
        self._sample = {name: np.asarray(value) for name, value in sample.items()}
        self.fields = {
            name: Field(value.dtype.name, value.shape[name in variable :], name in variable)
            for name, value in self._sample.items()
        }

    def __len__(self) -> int:
        return 1

    def read(
        self, indices: Int64s, out: Mapping[str, Array] | None = None
    ) -> dict[str, Array | Ragged]:
        rows = {name: [value] * len(indices) for name, value in self._sample.items()}
        return {
            name: Ragged.of(values) if self.fields[name].variable else np.stack(values)
            for name, values in rows.items()
        }


def sample_inputs(
    sample: Mapping[str, Any],
    data: DataConfig,
    task_section: Mapping[str, Any],
    precision: PrecisionConfig,
    seed: int,
) -> tuple[torch.Tensor, ...]:
    """Return the positional arguments of the model for one sample: `LoadedRun.inputs`."""
    index = load_index(data.path)
    with default_dtype(precision):
        task = bind_task(instantiate("task", task_section, seed=seed), data.path)
        if not isinstance(task, SplitTask):
            raise ConfigError(
                f"task._target_={task_section.get('_target_')} is no hpctrain.tasks.SplitTask, so "
                "nothing tells what the model's inputs are"
            )
        # A window is cut, and an image is decoded, before a sample is one.
        whole = {data.windows.field, data.images.field}
        variable = {name for name, field in index.fields.items() if field.variable} - whole
        source, device = _Alone(sample, variable), torch.device("cpu")
        statistics = index.statistics.get(data.train_split, {})
        chosen = EvaluationTransforms(data, device, seed).of(source, statistics)
        samples, batches = chosen["transforms"], chosen["batch_transforms"]
        loader = Loader(
            source,
            global_batch_size=1,
            shuffle=False,
            max_epochs=1,
            threads=0,
            collate="pack" if data.collate == "pack" else "pad",
            workers=Workers(source, OneByOne(samples), 0) if samples else None,
        )
        feed = DevicePrefetcher(loader, device, bind(Compose(batches), statistics))
        try:
            return task.inputs(wide_batch(next(iter(feed))))
        finally:
            feed.close()
