"""Builds the feeds of a trainer from the `data` section of the config.

path ── place (staged? verified?) ── Reader ── windows? decoded? ──┐
mixture: NAME ── …                                                 ├── Loader ── DevicePrefetcher
shuffle, subset, fold, balance, weights, buckets … ── sampler ─────┘
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hpctrain.config.rules.batch_sizes import Ramp
from hpctrain.config.schema import DataConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.loading.loader import Loader
from hpctrain.data.loading.steps import Tail
from hpctrain.data.places.origin import load_index
from hpctrain.data.places.placement import open_place
from hpctrain.data.places.verification import verify
from hpctrain.data.samplers.block_order import BlockOrder
from hpctrain.data.samplers.buckets import Buckets
from hpctrain.data.samplers.mixture import Mixture
from hpctrain.data.samplers.order import Order, Repeat, Sampler
from hpctrain.data.samplers.subset import Subset, column
from hpctrain.data.samplers.weighted import Balanced
from hpctrain.data.shards.index import Index, Statistics
from hpctrain.data.source import Source
from hpctrain.data.sources.concat import Concat
from hpctrain.data.sources.images import Decoded
from hpctrain.data.sources.reader import Reader
from hpctrain.data.sources.windows import Windows
from hpctrain.data.transforms import Compose, bind
from hpctrain.data.workers.pool import Workers
from hpctrain.data.workers.samples import OneByOne
from hpctrain.engine.building.chosen_samples import ChosenSamples
from hpctrain.engine.building.evaluation_transforms import EvaluationTransforms, transforms_of
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.errors import DataError

_SORTED = 8192  # samples that are sorted by length at a time, rounded up to whole batches


class DataBuilder:
    """Builds the feeds of one rank, in batches of these global sizes.

    `mesh` divides the samples, and has the device that the batches are on. `cores` is how many of
    the processor's cores the rank has: all but one decode images.
    """

    def __init__(self, data: DataConfig, sizes: Ramp, seed: int, mesh: Mesh, cores: int) -> None:
        self._data, self._sizes, self._seed, self._mesh = data, sizes, seed, mesh
        self._cores = cores
        self._indices: dict[str, Index] = {}
        self._closes: list[Callable[[], None]] = []
        self._samples = ChosenSamples(data, seed)
        self._of_evaluation = EvaluationTransforms(data, mesh.device, seed)

    def training(self) -> DevicePrefetcher:
        """Return the feed of the training split, or of the mixture."""
        data = self._data
        if data.mixture:
            source, sampler = self._mixture()
        else:
            source, reader = self._source(data.path, data.train_split)
            sampler = self._sampler(source, reader, self._seed)
        return self._feed(
            source,
            sampler,
            global_batch_size=self._sizes.final,
            shares=(self._mesh.first_share, self._mesh.shares, self._mesh.weight),
            tail="drop" if data.tail == "drop" else "pad",
            ramp=self._sizes.stages,
            transforms=transforms_of("data.transforms", data.transforms, self._seed),
            batch_transforms=transforms_of(
                "data.batch_transforms", data.batch_transforms, self._seed
            ),
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
        sampler: Sampler = Order(len(source), 0, shuffle=False)
        if of_fold:
            indices = self._samples.of_fold(reader)
            sampler = Subset(Order(len(indices), 0, shuffle=False), indices)
        return self._feed(
            source,
            sampler,
            global_batch_size=rows,
            shares=shares,
            tail="pad",
            max_epochs=1,
            **self._of_evaluation.of(source, self._statistics()),
        )

    def _mixture(self) -> tuple[Source, Sampler]:
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
        mixture = Mixture(
            counts,
            weights or None,
            self._seed,
            samplers=samplers,
        )
        return Concat(sources), mixture

    def _source(self, path: str, split: str) -> tuple[Source, Reader]:
        """Return the source of the loader, and the reader of shards below it."""
        data = self._data
        index = self._index(path)
        shards = index.split(split).shards
        folder = None if data.stage_dir is None else Path(data.stage_dir)
        place = open_place(path, data.stage, shards, folder=folder)
        if data.verify == "full":
            verify(path, shards, self._mesh.rank, self._mesh.degrees.ranks)
        self._closes.append(place.close)
        first_use = data.verify == "first_use"
        reader = Reader(path, split, data.fields, place=place, index=index, first_use=first_use)
        source: Source = reader
        if data.windows.field is not None:
            source = Windows(
                reader,
                data.windows.field,
                data.windows.length,
                data.windows.stride,
                documents=data.windows.documents,
            )
        images = data.images
        if images.field is not None:
            size = None if images.size is None else (images.size[0], images.size[1])
            source = Decoded(
                source,
                images.field,
                size=size,
                fit=images.fit,  # type: ignore[arg-type]
                threads=max(1, self._cores - 1),
            )
        return source, reader

    def _sampler(self, source: Source, reader: Reader, seed: int) -> Sampler:
        data, count = self._data, len(source)
        chosen = self._samples.of_training(reader, count)
        if chosen is not None:
            count = len(chosen)
        sampler: Sampler
        if data.balance is not None:
            values = column(reader.only([data.balance]), data.balance)
            if chosen is not None:
                values = values[np.asarray(chosen)]
            sampler = Balanced(values, seed)
        else:
            blocks = source if isinstance(source, Windows) else reader
            sampler = self._order(blocks, count, seed)
        if chosen is not None:
            sampler = Subset(sampler, chosen)
        if data.buckets.field is not None:
            lengths = partial(reader.lengths, data.buckets.field)
            size = self._sizes.final
            window = -(-_SORTED // size) * size
            sampler = Buckets(sampler, lengths, window, size, seed)
        return Repeat(sampler, data.repeat) if data.repeat > 1 else sampler

    def _order(self, blocks: Reader | Windows, count: int, seed: int) -> Sampler:
        data = self._data
        if data.shuffle != "block":
            return Order(count, seed, shuffle=data.shuffle == "full")
        return BlockOrder(count, seed, blocks.block_size(), data.window)

    def _feed(
        self,
        source: Source,
        sampler: Sampler,
        *,
        global_batch_size: int,
        shares: tuple[int, int, int],
        tail: Tail,
        transforms: list[Any],
        batch_transforms: list[Any],
        max_epochs: int | None = None,
        ramp: Sequence[tuple[int, int]] = (),
    ) -> DevicePrefetcher:
        data, seed = self._data, self._seed
        workers = Workers(source, OneByOne(transforms), data.workers) if transforms else None
        if workers is not None:
            self._closes.append(workers.close)
        loader = Loader(
            source,
            global_batch_size=global_batch_size,
            dp_rank=shares[0],
            dp_size=shares[1],
            dp_count=shares[2],
            sampler=sampler,
            seed=seed,
            tail=tail,
            max_epochs=max_epochs,
            ramp=ramp,
            collate="pack" if data.collate == "pack" else "pad",
            threads=data.threads,
            prefetch_bytes=int(data.prefetch_mb * 1e6),
            pin_memory=self._mesh.device.type == "cuda",
            workers=workers,
        )
        transform = (
            bind(Compose(batch_transforms), self._statistics()) if batch_transforms else None
        )
        closes, self._closes = self._closes, []
        return DevicePrefetcher(loader, self._mesh.device, transform, seed=seed, closes=closes)

    def _statistics(self) -> Mapping[str, Statistics]:
        data = self._data
        return self._index(data.path).statistics.get(data.train_split, {})

    def _index(self, path: str) -> Index:
        if path not in self._indices:
            self._indices[path] = load_index(path)
        return self._indices[path]
