"""Builds the feeds of a trainer from the `data` section of the config.

path ── place (staged? verified?) ── Reader ── windows? decoded? ──┐
mixture: NAME ── …                                                 ├── Loader ── DevicePrefetcher
shuffle, subset, fold, balance, weights, buckets … ── sampler ─────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hpctrain.base.errors import DataError
from hpctrain.config.rules.batch_sizes import BatchSizeRamp
from hpctrain.config.schema import DataConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.places.placement import load_index, open_place
from hpctrain.data.samplers.order import Order, Repeat, Sampler
from hpctrain.data.shards.index import Statistics
from hpctrain.data.source import Source
from hpctrain.data.sources.reader import Reader
from hpctrain.engine.parallel.mesh import Mesh

if TYPE_CHECKING:  # what a data set does not need is imported where it is made
    from hpctrain.data.sources.windows import Windows
    from hpctrain.data.transforms import Transform
    from hpctrain.data.workers.pool import Workers
    from hpctrain.engine.building.chosen_samples import ChosenSamples
    from hpctrain.engine.building.evaluation_transforms import EvaluationTransforms

_KINDS = "transforms", "batch_transforms"  # of samples, and of batches on the device
_SORTED = 8192  # samples that are sorted by length at a time, rounded up to whole batches


class DataBuilder:
    """Builds the feeds of one rank, in batches of these global sizes.

    `mesh` divides the samples, and has the device that the batches are on. `cores` is how many of
    the processor's cores the rank has: all but one decode images.
    """

    def __init__(
        self, data: DataConfig, sizes: BatchSizeRamp, seed: int, mesh: Mesh, cores: int
    ) -> None:
        self._data, self._sizes, self._seed, self._mesh = data, sizes, seed, mesh
        self._cores = cores
        self._closes: list[Callable[[], None]] = []
        self._of_evaluation: EvaluationTransforms | None = None

    def training(self) -> DevicePrefetcher:
        """Return the feed of the training split, or of the mixture."""
        data, mesh = self._data, self._mesh
        if data.mixture:
            source, sampler = self._mixture()
        else:
            source, reader = self._source(data.path, data.train_split)
            sampler = self._sampler(source, reader, self._seed)
        shares = mesh.first_share, mesh.shares, mesh.weight
        transforms = {name: self._made(name) for name in _KINDS if getattr(data, name)}
        return self._feed(
            *(source, sampler, shares, transforms),
            global_batch_size=self._sizes.final,
            tail="drop" if data.tail == "drop" else "pad",
            ramp=self._sizes.stages,
        )

    def evaluation(
        self, split: str | None = None, path: str | None = None
    ) -> DevicePrefetcher | None:
        """Return the feed of the validation split, with each sample once; None without a split.

        Without `split` it is `data.val_split`, or the fold of `data.fold`. Transforms on the device
        have the statistics of the training, with another data set (`path`), too.
        """
        if split is None and self._data.evaluated is None:
            return None
        # Evaluation keeps no activations for a backward pass, so a larger batch fits.
        mesh = self._mesh
        rows = 2 * (self._sizes.final // mesh.shares) * mesh.dp_size
        return self._evaluation_feed(rows, (mesh.dp_rank, mesh.dp_size, 1), split, path)

    def evaluations(self) -> Iterator[tuple[str, DevicePrefetcher]]:
        """Yield the feed of each evaluation, with what the names of its metrics begin with."""
        if (feed := self.evaluation()) is not None:
            yield "val", feed
        for name, (path, split) in self._data.other_sets.items():
            if (feed := self.evaluation(split, path)) is not None:
                yield f"val/{name}", feed

    def in_order(self, rows: int) -> DevicePrefetcher:
        """Return a feed of the validation split in order, `rows` a batch, whole on every rank."""
        return self._evaluation_feed(rows, (0, 1, 1))

    def _evaluation_feed(
        self,
        rows: int,
        shares: tuple[int, int, int],
        split: str | None = None,
        path: str | None = None,
    ) -> DevicePrefetcher:
        data = self._data
        of_fold = split is None and data.fold_of is not None
        split = data.train_split if of_fold else split or str(data.val_split)
        source, reader = self._source(path or data.path, split)
        sampler = self._fold(reader) if of_fold else Order(len(source), 0, shuffle=False)
        given = source, sampler, shares, self._transforms_of_evaluation(source)
        return self._feed(*given, global_batch_size=rows, tail="pad", max_epochs=1)

    def _fold(self, reader: Reader) -> Sampler:
        """Return the order of the samples of the fold."""
        from hpctrain.data.samplers.subset import Subset

        indices = self._chosen.of_fold(reader)
        return Subset(Order(len(indices), 0, shuffle=False), indices)

    def _mixture(self) -> tuple[Source, Sampler]:
        from hpctrain.data.samplers.mixture import Mixture
        from hpctrain.data.sources.concat import Concat

        data = self._data
        sources, samplers, weights = {}, {}, {}
        for part in data.mixture:
            name, path = str(part["name"]), part["path"]
            split = part.get("split", data.train_split)
            try:
                sources[name], reader = self._source(path, split)
                # With one seed, data sets of equal size would be shuffled in the same order.
                own = self._seed ^ xxhash.xxh64_intdigest(name.encode())
                samplers[name] = self._sampler(sources[name], reader, own)
            except DataError as error:
                raise DataError(f"data.mixture, {name}: {error}") from error
            if "weight" in part:
                weights[name] = float(part["weight"])
        counts = {name: len(source) for name, source in sources.items()}
        mixture = Mixture(counts, weights or None, self._seed, samplers=samplers)
        return Concat(sources), mixture

    def _source(self, path: str, split: str) -> tuple[Source, Reader]:
        """Return the source of the loader, and the reader of shards below it."""
        data, index = self._data, load_index(path)
        folder = None if data.stage_dir is None else Path(data.stage_dir)
        place = open_place(path, data.stage, index.split(split).shards, folder=folder)
        self._closes.append(place.close)
        first_use = data.verify == "first_use"
        reader = Reader(path, split, data.fields, place=place, index=index, first_use=first_use)
        source: Source = reader
        if data.windows.field is not None:
            source = self._windows(reader, data.windows.field)
        if data.images.field is not None:
            source = self._decoded(source, data.images.field)
        return source, reader

    def _windows(self, reader: Reader, field: str) -> Windows:
        from hpctrain.data.sources.windows import Windows

        cut = self._data.windows
        return Windows(reader, field, cut.length, cut.stride, documents=cut.documents)

    def _decoded(self, source: Source, field: str) -> Source:
        from hpctrain.data.sources.images import Decoded

        images, threads = self._data.images, max(1, self._cores - 1)
        size = None if images.size is None else (images.size[0], images.size[1])
        fit: Any = images.fit
        return Decoded(source, field, size=size, fit=fit, threads=threads)

    def _sampler(self, source: Source, reader: Reader, seed: int) -> Sampler:
        data = self._data
        if data.subset is None and data.fold is None and data.balance is None:
            sampler = self._order(source, reader, len(source), seed)
        else:
            sampler = self._sampler_of_some(source, reader, seed)
        if data.buckets.field is not None:
            sampler = self._in_buckets(sampler, reader, data.buckets.field, seed)
        return Repeat(sampler, data.repeat) if data.repeat > 1 else sampler

    def _order(self, source: Source, reader: Reader, count: int, seed: int) -> Sampler:
        if self._data.shuffle != "block":
            return Order(count, seed, shuffle=self._data.shuffle == "full")
        from hpctrain.data.samplers.block_order import BlockOrder

        blocks: Any = source if hasattr(source, "block_size") else reader
        return BlockOrder(count, seed, blocks.block_size(), self._data.window)

    def _sampler_of_some(self, source: Source, reader: Reader, seed: int) -> Sampler:
        """Return the order of the samples of subset and fold, or draws that balance classes."""
        from hpctrain.data.samplers.subset import Subset, column
        from hpctrain.data.samplers.weighted import Balanced

        balance, chosen = self._data.balance, self._chosen.of_training(reader, len(source))
        sampler: Sampler
        if balance is not None:
            values = column(reader.only([balance]), balance)
            sampler = Balanced(values if chosen is None else values[np.asarray(chosen)], seed)
        else:
            count = len(source) if chosen is None else len(chosen)
            sampler = self._order(source, reader, count, seed)
        return sampler if chosen is None else Subset(sampler, chosen)

    def _in_buckets(self, sampler: Sampler, reader: Reader, field: str, seed: int) -> Sampler:
        from hpctrain.data.samplers.buckets import Buckets

        size = self._sizes.final
        window = -(-_SORTED // size) * size
        return Buckets(sampler, partial(reader.lengths, field), window, size, seed)

    def _feed(
        self,
        source: Source,
        sampler: Sampler,
        shares: tuple[int, int, int],
        transforms: Mapping[str, list[Any]],
        **options: Any,
    ) -> DevicePrefetcher:
        """Return a feed of this rank's shares; `options` are those of a `Loader`."""
        data, device = self._data, self._mesh.device
        of_samples, of_batches = (transforms.get(name) for name in _KINDS)
        loader = Loader(
            source,
            dp_rank=shares[0],
            dp_size=shares[1],
            dp_count=shares[2],
            sampler=sampler,
            seed=self._seed,
            collate="pack" if data.collate == "pack" else "pad",
            threads=data.threads,
            prefetch_bytes=int(data.prefetch_mb * 1e6),
            pin_memory=device.type == "cuda",
            workers=self._workers(source, of_samples) if of_samples else None,
            **options,
        )
        transform = self._composed(of_batches) if of_batches else None
        closes, self._closes = self._closes, []
        return DevicePrefetcher(loader, device, transform, seed=self._seed, closes=closes)

    def _workers(self, source: Source, transforms: list[Any]) -> Workers:
        from hpctrain.data.workers.pool import Workers
        from hpctrain.data.workers.samples import OneByOne

        workers = Workers(source, OneByOne(transforms), self._data.workers)
        self._closes.append(workers.close)
        return workers

    def _composed(self, batch_transforms: list[Any]) -> Transform:
        from hpctrain.data.transforms import Compose, bind

        return bind(Compose(batch_transforms), self._statistics())

    def _made(self, name: str) -> list[Any]:
        """Return the transforms of the training that the config names."""
        from hpctrain.engine.building.evaluation_transforms import transforms_of

        return transforms_of(f"data.{name}", getattr(self._data, name), self._seed)

    def _transforms_of_evaluation(self, source: Source) -> dict[str, list[Any]]:
        if not any(getattr(self._data, f"{of}{each}") for of in ("", "val_") for each in _KINDS):
            return {}
        from hpctrain.engine.building.evaluation_transforms import EvaluationTransforms

        if self._of_evaluation is None:
            self._of_evaluation = EvaluationTransforms(self._data, self._mesh.device, self._seed)
        return self._of_evaluation.of(source, self._statistics())

    @cached_property
    def _chosen(self) -> ChosenSamples:
        from hpctrain.engine.building.chosen_samples import ChosenSamples

        return ChosenSamples(self._data, self._seed)

    def _statistics(self) -> Mapping[str, Statistics]:
        data = self._data
        return load_index(data.path).statistics.get(data.train_split, {})
