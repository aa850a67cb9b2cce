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
from torch.utils.data import DataLoader

from tests.benchmarks.loaders.competitor import Competitor, Stateful
from tests.benchmarks.loaders.works import Array, Batch, Work, tensor

SHARD = 64 * 2**20  # bytes of a file, a usual size in these formats


class Webdataset(Competitor):
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


class Streaming(Stateful):
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
