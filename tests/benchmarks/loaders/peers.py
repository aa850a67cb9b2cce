"""Defines the peers: loaders of other projects, each with its own files and fastest settings.

Peers are imported inside functions, because each one is installed only in its own environment.
"""

import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from tests.benchmarks.loaders.competitor import Competitor, MapStyle, Shuffle, Stateful
from tests.benchmarks.loaders.works import Array, Batch, Work, tensor

SHARD = 64 * 2**20  # bytes of a file, a usual size in these formats


class Peer(Competitor):
    peer = True


class Webdataset(Peer):
    """webdataset: tar files of raw bytes. It has no state: a resume skips the first batches."""

    package, shuffle = "webdataset", "shards + buffer of 1,000"

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        import webdataset

        pattern = f"{folder}/%05d.tar"
        with webdataset.ShardWriter(pattern, maxsize=SHARD, maxcount=10**9, verbose=0) as sink:
            for row, sample in enumerate(work.samples(folder.parent)):
                fields = {f"{name}.bin": value.tobytes() for name, value in sample.items()}
                sink.write({"__key__": f"{row:09d}", **fields})

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        import webdataset

        shards = sorted(map(str, folder.glob("*.tar")))
        buffer = min(1000, 256 * 2**20 // work.sample_bytes)
        dataset = webdataset.WebDataset(
            shards, shardshuffle=len(shards), detshuffle=True, seed=0, empty_check=False
        )
        dataset = dataset.compose(webdataset.detshuffle(buffer, seed=0))
        dataset = dataset.batched(work.batch, partial(_from_bytes, work), partial=False)
        self.loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0
        )
        self.skip = state or 0

    def epoch(self) -> Iterator[Batch]:
        skip, self.skip = self.skip, 0
        return islice(iter(self.loader), skip, None)


def _from_bytes(work: Work, samples: list[dict[str, bytes]]) -> Batch:
    """Return a batch made of samples {"FIELD.bin": bytes} or {FIELD: bytes}."""
    dot = "" if next(iter(work.fields)) in samples[0] else ".bin"
    batch = {}
    for name, (dtype, shape) in work.fields.items():
        joined = bytearray().join(sample[name + dot] for sample in samples)
        batch[name] = tensor(np.frombuffer(joined, dtype).reshape(len(samples), *shape))
    return batch


class Streaming(Stateful, Peer):
    """mosaicml-streaming: MDS files."""

    package, shuffle = "mosaicml-streaming", "shard blocks (py1e)"

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        streaming = _import_streaming()
        columns = {
            name: f"ndarray:{dtype}:{','.join(map(str, shape))}"
            if shape
            else dtype.removeprefix("u")
            for name, (dtype, shape) in work.fields.items()
        }
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=SHARD) as writer:
            for sample in work.samples(folder.parent):
                writer.write({k: v if v.shape else int(v) for k, v in sample.items()})

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        streaming = _import_streaming()
        streaming.base.util.clean_stale_shared_memory()  # left by this process's previous loader
        self.dataset = streaming.StreamingDataset(
            local=str(folder), batch_size=work.batch, shuffle=True, shuffle_seed=0
        )
        self.loader = streaming.StreamingDataLoader(
            self.dataset,
            batch_size=work.batch,
            num_workers=workers,
            persistent_workers=workers > 0,
            drop_last=True,
            collate_fn=_stack,
        )
        if state is not None:
            self.loader.load_state_dict(state)


def _import_streaming() -> Any:
    """Import and return streaming, with stubs for torchvision if that cannot be imported.

    streaming imports torchvision for data sets that are not used here. Its wheel on PyPI is for
    CUDA.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})
        sys.modules["torchvision.transforms.functional"].to_tensor = None
    import streaming

    return streaming


def _stack(samples: list[dict[str, Array]]) -> Batch:
    """Stack samples like torch's default_collate, which would walk nested samples first."""
    return {name: tensor(np.stack([sample[name] for sample in samples])) for name in samples[0]}


class Datasets(Peer):
    """Hugging Face datasets: Arrow files, read in batches of torch's format, as it documents."""

    package = "datasets"
    format = "torch"

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        import datasets
        import pyarrow

        table = {}
        for name, array in work.arrays(folder.parent).items():
            flat = pyarrow.array(array.reshape(-1))
            size = array[0].size
            table[name] = pyarrow.FixedSizeListArray.from_arrays(flat, size) if size > 1 else flat
        datasets.disable_progress_bars()
        datasets.Dataset(pyarrow.table(table)).save_to_disk(folder, max_shard_size=SHARD)

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        import datasets

        order = Shuffle(work.count, (state or 0) * work.batch)
        self.loader = DataLoader(
            datasets.load_from_disk(folder).with_format(self.format),
            batch_size=None,
            sampler=BatchSampler(order, work.batch, drop_last=True),
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=partial(_from_arrow if self.format == "arrow" else _from_torch, work),
        )


class DatasetsArrow(Datasets):
    """The same files, but code of this benchmark converts the Arrow tables to tensors."""

    by_hand = True
    format = "arrow"


def _from_torch(work: Work, batch: Batch) -> Batch:
    """Return a batch in the dtypes of `tensor`; datasets returns all integers as int64."""
    result = {}
    for name, (dtype, shape) in work.fields.items():
        wanted = torch.int32 if dtype == "uint16" else getattr(torch, dtype)
        result[name] = batch[name].reshape(-1, *shape).to(wanted)
    return result


def _from_arrow(work: Work, table: Any) -> Batch:
    batch = {}
    for name, (_, shape) in work.fields.items():
        column = table[name].combine_chunks()
        flat = column.flatten() if shape else column
        batch[name] = tensor(flat.to_numpy(zero_copy_only=False).reshape(len(table), *shape))
    return batch


class Grain(Peer):
    """grain: ArrayRecord files with one record in each group."""

    package = "grain"

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(f"{folder}/data.array_record", "group_size:1,uncompressed")
        for sample in work.samples(folder.parent):
            writer.write(b"".join(value.tobytes() for value in sample.values()))
        writer.close()

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        import grain

        records = grain.sources.ArrayRecordDataSource(f"{folder}/data.array_record")
        dataset = grain.MapDataset.source(records).seed(0).shuffle().repeat()
        dataset = dataset.batch(work.batch, drop_remainder=True, batch_fn=partial(_records, work))
        dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
        if workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        self.iterator = iter(dataset)
        if state is not None:
            self.iterator.set_state(state)

    def epoch(self) -> Iterator[Batch]:
        for batch in self.iterator:
            yield {name: tensor(array) for name, array in batch.items()}

    def state(self, consumed: int) -> Any:
        return self.iterator.get_state()


def _records(work: Work, records: list[bytes]) -> dict[str, Array]:
    """Return a batch made of records, each of which holds the bytes of all fields in order."""
    rows = np.frombuffer(bytearray().join(records), np.uint8).reshape(len(records), -1)
    batch, start = {}, 0
    for name, field in work.fields.items():
        stop = start + field.bytes
        part = np.ascontiguousarray(rows[:, start:stop])
        batch[name] = part.view(field.dtype).reshape(len(records), *field.shape)
        start = stop
    return batch


class Litdata(Stateful, Peer):
    """litdata: chunk files. Tokens are read by its TokensLoader, other samples by PyTreeLoader."""

    package, shuffle = "litdata", "in windows of a chunk"

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        from litdata.streaming.cache import Cache

        cache = Cache(str(folder), chunk_bytes=SHARD, item_loader=_item_loader(work))
        for row, sample in enumerate(work.samples(folder.parent)):
            flat = {k: v.reshape(-1) if v.shape else int(v) for k, v in sample.items()}
            cache[row] = flat.get("tokens", flat)  # a 1-D array is stored without a header
        cache.done()
        cache.merge()

    def __init__(self, work: Work, folder: Path, workers: int = 0, state: Any = None) -> None:
        import litdata

        dataset = litdata.StreamingDataset(
            str(folder), item_loader=_item_loader(work), shuffle=True, seed=0, drop_last=False
        )
        self.loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=work.batch,
            num_workers=workers,
            persistent_workers=workers > 0,
            drop_last=True,
            collate_fn=partial(_stack_flat, work),
        )
        if state is not None:
            self.loader.load_state_dict(state)


def _item_loader(work: Work) -> Any:
    from litdata.streaming.item_loader import PyTreeLoader, TokensLoader

    return TokensLoader(work.fields["tokens"].shape[0]) if work.name == "tokens" else PyTreeLoader()


def _stack_flat(work: Work, samples: list[Any]) -> Batch:
    if work.name == "tokens":
        return {"tokens": tensor(np.stack(samples))}
    columns = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {k: tensor(v.reshape(-1, *work.fields[k].shape)) for k, v in columns.items()}


class Lmdb(MapStyle):
    """lmdb in torch's DataLoader: one key for each sample, and one transaction for each batch."""

    package = "lmdb"

    @classmethod
    def write(cls, work: Work, folder: Path) -> None:
        import lmdb

        size = 2 * work.count * (work.sample_bytes + 8192)  # most bytes that the file may grow to
        with lmdb.open(str(folder), size, sync=False) as store, store.begin(write=True) as change:
            for row, sample in enumerate(work.samples(folder.parent)):
                value = b"".join(field.tobytes() for field in sample.values())
                change.put(row.to_bytes(8, "big"), value, append=True)

    def dataset(self, work: Work, folder: Path) -> Any:
        self.records = _Lmdb(work, folder)
        return self.records

    def close(self) -> None:
        if self.records.store is not None:
            self.records.store.close()  # a process may open it only once at a time


class _Lmdb:
    def __init__(self, work: Work, folder: Path) -> None:
        self.work, self.folder = work, folder
        self.store: Any = None

    def __len__(self) -> int:
        return self.work.count

    def __getitems__(self, rows: list[int]) -> Batch:
        import lmdb

        if self.store is None:  # opened in the worker process, not before the fork
            self.store = lmdb.open(str(self.folder), readonly=True, lock=False, readahead=False)
        with self.store.begin(buffers=True) as view:
            records = [view.get(row.to_bytes(8, "big")) for row in rows]
            return {name: tensor(array) for name, array in _records(self.work, records).items()}
