"""The transforms of an evaluation: those of `data.val_…`, or those of training that are not random.

data.transforms ── judged by the first samples (`hpctrain.data.randomness`) ─┬─ used, and watched
                                                                            ├─ left out, and said
                                                                            └─ ConfigError
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hpctrain.config.schema import DataConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.randomness import ROWS, SAMPLES, Verdict, marked, of_batches, of_samples
from hpctrain.data.source import Source
from hpctrain.data.transforms import Compose, bind
from hpctrain.data.transforms import Watched as WatchedBatches
from hpctrain.data.workers.pool import Workers
from hpctrain.data.workers.samples import OneByOne, SampleRandom, asked_for
from hpctrain.data.workers.samples import Watched as WatchedSamples
from hpctrain.errors import ConfigError
from hpctrain.job.building.instantiate import instantiate_all
from hpctrain.shards.index import Statistics

log = logging.getLogger(__name__)


class EvaluationTransforms:
    """Makes the transforms of evaluations. Each transform of the training is judged once."""

    def __init__(self, data: DataConfig, device: torch.device, seed: int, *, shown: bool) -> None:
        self._data, self._device, self._seed, self._shown = data, device, seed, shown
        self._verdicts: dict[str, Verdict] = {}

    def of(self, source: Source, statistics: Mapping[str, Statistics]) -> dict[str, list[Any]]:
        """Return new transforms for samples and for batches, by the names of the config keys.

        Samples of the source are read if transforms must be judged. The statistics, of the training
        split, are for the transforms of batches. If it is not clear what an evaluation uses, it is
        a ConfigError.
        """
        samples = self._chosen("transforms", WatchedSamples, partial(_of_samples, source))
        judge = partial(self._of_batches, source, samples, statistics)
        batches = self._chosen("batch_transforms", WatchedBatches, judge)
        return {"transforms": samples, "batch_transforms": batches}

    def _chosen(
        self,
        name: str,
        watched: Callable[[Any, str], Any],
        judge: Callable[[list[Any], Any], Verdict],
    ) -> list[Any]:
        own = getattr(self._data, f"val_{name}")
        if own is not None:
            return transforms_of(f"data.val_{name}", own, self._seed)
        kept: list[Any] = []
        nodes = getattr(self._data, name)
        for i, transform in enumerate(transforms_of(f"data.{name}", nodes, self._seed)):
            key, said = f"data.{name}[{i}]", marked(transform)
            if said is None and key not in self._verdicts:
                self._verdicts[key] = self._judged(key, name, judge(kept, transform), transform)
            if not said and self._verdicts.get(key) != "augments":
                kept.append(watched(transform, key))
        return kept

    def _judged(self, key: str, name: str, verdict: Verdict, transform: Any) -> Verdict:
        """Say what a verdict means for the evaluation."""
        while isinstance(transform, partial):
            transform = transform.func
        what = f"{key} ({getattr(transform, '__name__', type(transform).__name__)})"
        if verdict == "unclear":
            why = "is random, or refers to random numbers, and may convert the samples as well"
            raise ConfigError(asked_for(what, why))
        if verdict == "augments" and self._shown:
            log.warning(
                "evaluations leave out %s, which draws random numbers; data.val_%s would say what "
                "they use instead",
                *(what, name),
            )
        return verdict

    def _of_batches(
        self,
        source: Source,
        samples: list[Any],
        statistics: Mapping[str, Statistics],
        before: list[Any],
        transform: Any,
    ) -> Verdict:
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
        return of_batches(bind(transform, statistics), batches)


def _of_samples(source: Source, before: list[Any], transform: Any) -> Verdict:
    """Judge a transform by the first samples, as the transforms before it return them."""
    count = min(SAMPLES, len(source))
    rows, first, random = source.read(np.arange(count)), OneByOne(before), SampleRandom()
    samples = [
        first({name: value[i] for name, value in rows.items()}, random.at(0, 0, i))
        for i in range(count)
    ]
    return of_samples(transform, samples)


def transforms_of(key: str, nodes: Sequence[Mapping[str, Any]], seed: int) -> list[Any]:
    """Return the transforms that the sections at a key name."""
    needed = "{_target_: ...} of something that can be called"
    return instantiate_all(key, nodes, Callable, needed, seed)  # type: ignore[arg-type]
