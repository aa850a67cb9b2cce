"""Writes what a trained model says about each sample of a data set, as HDF5 shards.

split ── a part for each data-parallel rank ── shards of 65,536 samples ── index.json

The shards follow the order of the samples; the index is written last, so a folder without one is
what an interrupted prediction has left.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import sync
from hpctrain.base.secrets import referenced
from hpctrain.base.terminal.progress_bar import ProgressBar
from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.shards.field import Field
from hpctrain.data.shards.index import Index, Shard
from hpctrain.data.shards.shard import shard_name, write_shard
from hpctrain.data.shards.types import Array, Batch
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.long_work import long_work
from hpctrain.engine.tasks.task import SplitTask, Sums
from hpctrain.results.trained_model import Restored

SHARD_SAMPLES = 65536  # at most, about


class _Outputs:
    """A task that keeps what the model returns."""

    def __init__(self, task: SplitTask) -> None:
        self._task = task
        self.kept: dict[str, torch.Tensor] = {}

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        outputs = model(*self._task.inputs(batch))
        method = getattr(self._task, "predictions", None)
        found = {"prediction": outputs} if method is None else method(outputs, batch)
        self.kept = {name: _whole(value) for name, value in found.items()}
        return {"loss": (batch["mask"].sum() * 0.0, batch["mask"].sum())}


def _whole(outputs: Any) -> torch.Tensor:
    value = getattr(outputs, "logits", outputs)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"the model returns a {type(value).__name__}, which cannot be written; give the task "
            "a method `predictions(outputs, batch)` that returns tensors by name"
        )
    return value.full_tensor() if isinstance(value, DTensor) else value


def _array(value: torch.Tensor) -> Array:
    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def _field(rows: Array) -> Field:
    return Field(rows.dtype.name, tuple(rows.shape[1:]))


def _fields(kinds: dict[str, Any]) -> dict[str, Field]:
    return {name: Field(dtype, tuple(shape)) for name, (dtype, shape) in kinds.items()}


def _check_alike(name: str, *kinds: Field | None) -> None:
    """Check that rows of a field have one dtype and shape, in whichever batch they are."""
    if len({*kinds}) > 1:
        told = [f"{each.dtype} {each.shape}" if each else "none" for each in kinds]
        raise ConfigError(
            f"{name}: its rows are {' in one batch and '.join(told)} in another, as where "
            "predictions are as long as their input: let the task's method "
            "`predictions(outputs, batch)` pad them to one length"
        )


class Prediction:
    """The predictions for the evaluation split, by all ranks that were started.

    `out` is a new or empty folder. The index has the `facts` that the predictions follow from.
    """

    def __init__(self, trained: Restored, out: Path, facts: dict[str, Any]) -> None:
        parts = trained.parts
        if not isinstance(parts.task, SplitTask):
            target = parts.config.task.get("_target_")
            raise ConfigError(
                f"task._target_={target}: predictions need a task that is a "
                "hpctrain.tasks.SplitTask, whose `inputs` are those of the model"
            )
        self._trained, self._out, self._facts = trained, out, referenced(facts)
        self._mesh, self._task, self._ranks = parts.mesh, parts.task, parts.ranks
        config, degrees = parts.config, self._mesh.degrees
        self._rows = 2 * BatchSizes.of(config.train, config.parallel, degrees).share
        self._feed: DevicePrefetcher = parts.data.in_order(self._rows)
        self._count = self._feed.loader.count
        # The ranks make equally many passes, since those of FSDP gather parameters together.
        self._passes = -(-self._count // (self._mesh.dp_size * self._rows))
        self._split = str(config.data.evaluated)
        self._written: list[Any] = []

    def write(self) -> None:
        """Write the shards and their index; all ranks call this together."""
        self._begin()
        with self._trained.progress(self._count, "predicted ") as shown:
            self._make(shown)
        self._feed.close()
        with long_work("writing predictions"):
            pass
        written = [one for rank in objects.all_gather(self._written) for one in rank]
        if self._ranks.is_main:
            self._finish(sorted(written))
        dist.barrier()

    def _begin(self) -> None:
        """Check that the folder is new or empty."""
        problem = ""
        if self._ranks.is_main:
            try:
                self._out.mkdir(parents=True, exist_ok=True)
                if any(self._out.iterdir()):
                    problem = (
                        f"{self._out} has files, as an interrupted prediction leaves them: delete "
                        "it, or give a folder that is new or empty"
                    )
            except OSError as error:
                problem = f"{self._out}: cannot be used ({error})"
        if problem := objects.broadcast(problem):
            raise StorageError(problem)

    def _make(self, shown: ProgressBar) -> None:
        """Write the shards of this rank: its part of the samples, in their order."""
        first = self._mesh.dp_rank * self._passes * self._rows
        left = max(0, min(self._count - first, self._passes * self._rows))
        shards = -(-self._passes * self._rows // SHARD_SAMPLES)
        each = -(-self._passes // shards)  # passes of a shard
        parts: dict[str, list[Array]] = {}
        for number, batch in enumerate(self._taken(first)):
            outputs = _Outputs(self._task)
            self._trained.model.evaluate(outputs, batch)
            rows = min(self._rows, left)
            left -= rows
            for name, value in outputs.kept.items():
                if len(value) != len(batch["mask"]):
                    raise ConfigError(
                        f"{name} has {len(value)} rows for {len(batch['mask'])} samples: a "
                        "prediction has one row for each sample"
                    )
                if rows:
                    before = parts.setdefault(name, [])
                    before.append(_array(value[:rows]))
                    _check_alike(name, _field(before[0]), _field(before[-1]))
            shown.advance(min(self._mesh.dp_size * self._rows, self._count - shown.samples), 0)
            if (number + 1) % each == 0 or number + 1 == self._passes:
                # The ranks of a replica have the same outputs, and one of them writes.
                if parts and self._mesh.is_counted:
                    self._write(self._mesh.dp_rank * shards + number // each, parts)
                parts = {}

    def _taken(self, first: int) -> Iterator[Batch]:
        """Yield the batches from a sample on; the last one again where samples are lacking."""
        last = (self._count - 1) // self._rows * self._rows
        self._feed.load_state_dict({"consumed": min(first, last)})
        batches = iter(self._feed)
        batch = next(batches)
        for _ in range(self._passes):
            yield batch
            batch = next(batches, batch)

    def _write(self, number: int, parts: dict[str, list[Array]]) -> None:
        rows = sum(map(len, next(iter(parts.values()))))
        fields = {key: _field(values[0]) for key, values in parts.items()}
        name = shard_name(self._split, number)
        unfinished = self._out / f".{name}.unfinished"
        try:
            size, digest = write_shard(unfinished, self._split, fields, parts)
            unfinished.rename(self._out / name)
            sync(self._out)
        except OSError as error:
            raise StorageError(f"{self._out / name}: cannot be written ({error})") from error
        kinds = {key: (field.dtype, field.shape) for key, field in fields.items()}
        self._written.append([number, rows, size, digest, kinds])

    def _finish(self, written: list[Any]) -> None:
        """Write the index of the shards: number, samples, bytes, digest and fields of each."""
        fields = _fields(written[0][-1])
        shards = []
        for number, rows, size, digest, kinds in written:
            for name, field in fields.items():
                _check_alike(name, field, _fields(kinds).get(name))
            shards.append(Shard(shard_name(self._split, number), self._split, rows, size, digest))
        source = {"name": "predict", **self._facts}
        Index(fields, tuple(shards), provenance={"source": source}).save(self._out)
