"""Writes what a trained model says about each sample of a data set, as HDF5 shards.

split ── parts of 65,536 samples ── one data-parallel rank each ── OUT/NAME-00000.h5 ── index.json

The shards follow the order of the samples; the index is written last, so a folder without one is
what an interrupted prediction has left. A shard has fewer samples
where otherwise some ranks would have nothing to do.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.schema import ParallelConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.disk import sync
from hpctrain.distributed import objects
from hpctrain.distributed.long_work import long_work
from hpctrain.errors import ConfigError, StorageError
from hpctrain.progress_bar import Progress
from hpctrain.secrets import referenced
from hpctrain.shards.field import Field
from hpctrain.shards.index import Index, Shard
from hpctrain.shards.shard import shard_name, write_shard
from hpctrain.shards.types import Array, Batch
from hpctrain.tasks import SplitTask, Sums
from hpctrain.trained.restored import Restored

SHARD_SAMPLES = 65536  # at most, about


def refuse_divided_outputs(parallel: ParallelConfig) -> None:
    """Raise a ConfigError for a layout in which no rank has whole outputs of the model."""
    if parallel.pp > 1 or parallel.cp > 1:
        raise ConfigError(
            f"predict with parallel.pp={parallel.pp} and parallel.cp={parallel.cp}: "
            "no rank has whole outputs; leave them out, and the ranks are data parallel (a "
            "checkpoint of any layout fits)"
        )


def predict(trained: Restored, out: Path, facts: dict[str, Any]) -> Index:
    """Write the predictions for the evaluation split; all ranks that were started call it together.

    `out` is a new or empty folder. The index has the `facts` that the predictions follow from.
    """
    if not isinstance(trained.parts.task, SplitTask):
        target = trained.parts.config.task.get("_target_")
        raise ConfigError(
            f"task._target_={target}: predictions need a task that is a "
            "hpctrain.tasks.SplitTask, whose `inputs` are those of the model"
        )
    return _Prediction(trained, trained.parts.task, out, facts).run()


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


class _Prediction:
    def __init__(
        self, trained: Restored, task: SplitTask, out: Path, facts: dict[str, Any]
    ) -> None:
        parts = trained.parts
        self._trained, self._out, self._facts = trained, out, referenced(facts)
        self._mesh, self._task, self._ranks = parts.mesh, task, parts.ranks
        self._rows = 2 * BatchSizes.of(parts.config, self._mesh.degrees).share
        self._feed: DevicePrefetcher = parts.data.in_order(self._rows)
        self._count = self._feed.loader.count
        share = -(-self._count // (self._mesh.dp_size * self._rows))
        self._size = max(1, min(SHARD_SAMPLES // self._rows, share)) * self._rows
        self._split = str(parts.config.data.evaluated)
        self._written: list[Any] = []

    def run(self) -> Index:
        self._begin()
        todo = range(-(-self._count // self._size))
        size, own = self._mesh.dp_size, self._mesh.dp_rank
        with self._trained.progress(self._count, "predicted ") as shown:
            # All ranks make the same passes, since those of FSDP gather parameters together.
            for first in range(0, len(todo), size):
                turn = todo[first : first + size]
                self._make(turn[min(own, len(turn) - 1)], turn, shown, kept=own < len(turn))
        self._feed.close()
        with long_work("writing predictions"):
            pass
        written = [one for rank in objects.all_gather(self._written) for one in rank]
        if self._ranks.is_main:
            self._finish(sorted(written))
        dist.barrier()
        return Index.load(self._out)

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

    def _samples(self, number: int) -> int:
        return min(self._size, self._count - number * self._size)

    def _make(self, number: int, turn: Sequence[int], shown: Progress, *, kept: bool) -> None:
        """Make the shard `number`, while the other ranks make the others of this turn."""
        rows = self._samples(number)
        passes = -(-max(map(self._samples, turn)) // self._rows)
        parts: dict[str, list[Array]] = {}
        for i, batch in enumerate(self._taken(number * self._size, passes)):
            outputs = _Outputs(self._task)
            self._trained.model.evaluate(outputs, batch)
            first = i * self._rows
            for name, value in outputs.kept.items():
                if len(value) != len(batch["mask"]):
                    raise ConfigError(
                        f"{name} has {len(value)} rows for {len(batch['mask'])} samples: a "
                        "prediction has one row for each sample"
                    )
                kept_rows = value[: max(0, rows - first)]
                if not len(kept_rows):
                    continue
                before = parts.setdefault(name, [])
                before.append(_array(kept_rows))
                _check_alike(name, _field(before[0]), _field(before[-1]))
            left = (self._samples(n) - first for n in turn)
            shown.advance(sum(max(0, min(self._rows, n)) for n in left), 0)
        # The ranks of a replica have the same outputs, and one of them writes.
        if kept and self._mesh.is_counted:
            self._write(number, rows, parts)

    def _taken(self, start: int, passes: int) -> Iterator[Batch]:
        """Yield so many batches; the last one again where samples are lacking."""
        self._feed.load_state_dict({"consumed": start})
        given, last = 0, None
        for batch in self._feed:
            given, last = given + 1, batch
            yield batch
            if given == passes:
                return
        while last is not None and given < passes:
            given += 1
            yield last

    def _write(self, number: int, rows: int, parts: dict[str, list[Array]]) -> None:
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
