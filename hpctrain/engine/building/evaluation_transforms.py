"""The transforms of an evaluation: those of `data.val_…`, or those of training that are not random.

data.transforms ── marked `random = True`: left out ── any other: tried on the first samples
                   (`hpctrain.data.randomness`), a ConfigError if it draws, and watched
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import DataConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.randomness import ROWS, SAMPLES, draws_for_batches, draws_for_samples, marked
from hpctrain.data.shards.index import Statistics
from hpctrain.data.source import Source
from hpctrain.data.transforms import Compose, bind
from hpctrain.data.transforms import WatchedBatches as WatchedBatches
from hpctrain.data.workers.pool import Workers
from hpctrain.data.workers.samples import OneByOne, SampleRandom, asked_for
from hpctrain.data.workers.samples import Watched as WatchedSamples
from hpctrain.engine.building.instantiate import instantiate_all


class EvaluationTransforms:
    """Makes the transforms of evaluations. Each transform of the training is tried once."""

    def __init__(self, data: DataConfig, device: torch.device, seed: int) -> None:
        self._data, self._device, self._seed = data, device, seed
        self._tried: set[str] = set()

    def of(self, source: Source, statistics: Mapping[str, Statistics]) -> dict[str, list[Any]]:
        """Return new transforms for samples and for batches, by the names of the config keys.

        Samples of the source are read if transforms must be tried. The statistics, of the training
        split, are for the transforms of batches. One that is random is a ConfigError.
        """
        samples = self._chosen("transforms", WatchedSamples, partial(_of_samples, source))
        of_batches = partial(self._of_batches, source, samples, statistics)
        batches = self._chosen("batch_transforms", WatchedBatches, of_batches)
        return {"transforms": samples, "batch_transforms": batches}

    def _chosen(
        self,
        name: str,
        watched: Callable[[Any, str], Any],
        is_random: Callable[[list[Any], Any], bool],
    ) -> list[Any]:
        own = getattr(self._data, f"val_{name}")
        if own is not None:
            return transforms_of(f"data.val_{name}", own, self._seed)
        kept: list[Any] = []
        nodes = getattr(self._data, name)
        for i, transform in enumerate(transforms_of(f"data.{name}", nodes, self._seed)):
            key, said = f"data.{name}[{i}]", marked(transform)
            if said is None and key not in self._tried:
                if is_random(kept, transform):
                    what = f"{key} ({_name(transform)})"
                    raise ConfigError(asked_for(what, "is random in an evaluation"))
                self._tried.add(key)
            if not said:
                kept.append(watched(transform, key))
        return kept

    def _of_batches(
        self,
        source: Source,
        samples: list[Any],
        statistics: Mapping[str, Statistics],
        before: list[Any],
        transform: Any,
    ) -> bool:
        loader = Loader(
            source,
            global_batch_size=min(ROWS, len(source)),
            shuffle=False,
            max_epochs=1,
            threads=0,
            collate="pack" if self._data.collate == "pack" else "pad",
            workers=Workers(source, OneByOne(samples), 0) if samples else None,
        )
        feed = DevicePrefetcher(loader, self._device, bind(Compose(before), statistics))
        batches = [
            {name: value.clone() for name, value in batch.items()}
            for batch in itertools.islice(feed, SAMPLES)
        ]
        return draws_for_batches(bind(transform, statistics), batches)


def _of_samples(source: Source, before: list[Any], transform: Any) -> bool:
    """Try a transform on the first samples, as the transforms before it return them."""
    count = min(SAMPLES, len(source))
    rows, first, random = source.read(np.arange(count)), OneByOne(before), SampleRandom()
    samples = [
        first({name: value[i] for name, value in rows.items()}, random.at(0, 0, i))
        for i in range(count)
    ]
    return draws_for_samples(transform, samples)


def _name(transform: Any) -> str:
    while isinstance(transform, partial):
        transform = transform.func
    return str(getattr(transform, "__name__", type(transform).__name__))


def transforms_of(key: str, nodes: Sequence[Mapping[str, Any]], seed: int) -> list[Any]:
    """Return the transforms that the sections at a key name."""
    needed = "{_target_: ...} of something that can be called"
    return instantiate_all(key, nodes, Callable, needed, seed)  # type: ignore[arg-type]
