"""The parts of a training, each measured by itself.

data            the loader alone: batches are read, made and sent to the device, and dropped
compute         steps on one batch that stays on the device; with several ranks, they send gradients
whole           steps as in the training, with the loader
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from hpctrain.base.errors import DataError
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.sections import LoopSections
from hpctrain.data.shards.types import Batch
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.distributed import objects
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.feeds import Feed
from hpctrain.engine.loop import Trainer, build
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parts.clocks import Account
from hpctrain.engine.steps.place import Place
from hpctrain.insight.doctor.measures.speeds import synchronise
from hpctrain.insight.estimates.hardware import Hardware
from hpctrain.insight.flops.flops import flops_of_training
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.tracker import Tracker

Batches = Generator[Batch, None, None]
_DRAIN_S = 10.0
_WARM_UP = 5  # steps that are not measured: they compile, allocate and connect


@dataclass(frozen=True)
class PartFigures:
    """The figures of one part."""

    samples_per_s: float  # of all ranks, over all steps
    p50_ms: float
    p95_ms: float
    mb_per_s: float | None = None  # 1e6 bytes/s of samples of all ranks; None of steps
    mfu_percent: float | None = None  # None where hardware or model are unknown

    @classmethod
    def of(
        cls,
        seconds: Sequence[Sequence[float]],
        samples: int,
        *,
        step_bytes: float | None = None,
        step_flops: float | None = None,
        peak: float | None = None,
    ) -> Self:
        """Return the figures of some steps, from the seconds of the steps of each rank.

        `samples`, `step_bytes` and `step_flops` are those of a step of all ranks; `peak` is that of
        all devices in FLOP/s.
        """
        # The ranks wait for the slowest one.
        mean = max(sum(own) / len(own) for own in seconds)
        steps = [max(step) for step in zip(*seconds, strict=True)]
        p50, p95 = np.percentile(steps, [50, 95], method="inverted_cdf")  # the least that is enough
        return cls(
            samples / mean,
            1000 * float(p50),
            1000 * float(p95),
            None if step_bytes is None else step_bytes / mean / 1e6,
            None if not step_flops or not peak else 100 * step_flops / mean / peak,
        )


@dataclass
class Bench:
    """One rank of a benchmark; all ranks call the same methods.

    Building the training may write into the folder. `steps` are measured; without `hardware` there
    is no MFU.
    """

    sections: LoopSections
    ranks: RankInfo
    device: torch.device
    folder: Path
    steps: int
    hardware: Hardware | None = None

    def measured(self, parts: list[str]) -> dict[str, PartFigures]:
        """Return the figures of these parts, the same on all ranks."""
        found: dict[str, PartFigures] = {}
        account = Account(0.0, self.ranks.world_size)
        with Stop() as stop, default_dtype(self.sections.precision):
            of_run = self.sections, RunDir(self.folder), self.ranks, self.device, Tracker()
            trainer = build(Place(*of_run, stop, account))
            batches = self._batches(trainer.session.feed)
            with trainer.session.closing(), closing(batches):
                for part in parts:
                    found[part] = getattr(self, part)(trainer, batches)
        return found

    def _batches(self, loader: Feed) -> Batches:
        """Yield batches for ever; a loader that ends begins anew."""
        while True:
            count = 0
            for batch in loader:
                count += 1
                yield batch
            if not count:
                raise DataError(f"data.path={self.sections.data.path}: the loader gives no batch")
            loader.load_state_dict({"consumed": 0})

    def data(self, trainer: Trainer, batches: Batches) -> PartFigures:
        """Measure the loader alone."""
        size = _bytes(next(batches))
        # What was read ahead is not the speed of reading.
        held, end = self.sections.data.prefetch_mb * 1e6 / max(size, 1), time.monotonic() + _DRAIN_S
        for _ in range(int(held)):
            next(batches)
            if time.monotonic() > end:
                break
        seconds, samples = self._seconds(lambda: next(batches)), self._samples
        return PartFigures.of(seconds, samples, step_bytes=size * self.ranks.world_size)

    def compute(self, trainer: Trainer, batches: Batches) -> PartFigures:
        """Measure steps on one batch, which is read once."""
        batch = {name: value.clone() for name, value in next(batches).items()}
        step, lr = trainer.train_step, trainer.schedule(0)
        seconds = self._seconds(lambda: step(batch, lr))
        return self._of_steps(seconds, trainer, batch)

    def whole(self, trainer: Trainer, batches: Batches) -> PartFigures:
        """Measure steps with the loader."""
        step, lr = trainer.train_step, trainer.schedule(0)
        batch = next(batches)
        seconds = self._seconds(lambda: step(next(batches), lr))
        return self._of_steps(seconds, trainer, batch)

    def _of_steps(self, seconds: list[list[float]], trainer: Trainer, batch: Batch) -> PartFigures:
        one = None if self.hardware is None else self.hardware.peak(self.sections.precision.compute)
        flops = None
        if one is not None:
            model = partial(instantiate, "model", self.sections.model)
            flops = flops_of_training(model, trainer.train_step.task, batch)
        return PartFigures.of(
            seconds,
            self._samples,
            step_flops=None if flops is None else float(flops.training * self._samples),
            peak=None if one is None else one * self.ranks.world_size,
        )

    @property
    def _samples(self) -> int:
        """The samples of a step of all ranks."""
        return self.sections.train.global_batch_size

    def _seconds(self, work: Callable[[], object]) -> list[list[float]]:
        """Return the times of the steps of each rank."""
        dist.barrier()
        own = step_seconds(work, self.device, self.steps)
        return [list(each) for each in objects.all_gather(own)]


def step_seconds(work: Callable[[], object], device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each step, after some that warm up.

    Events mark the steps on a GPU, which does not wait between two of them.
    """

    def mark() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    for _ in range(_WARM_UP):
        work()
    synchronise(device)
    marks = [mark()]
    for _ in range(steps):
        work()
        marks.append(mark())
    synchronise(device)
    if device.type == "cuda":
        return [first.elapsed_time(second) / 1000 for first, second in pairwise(marks)]
    return [second - first for first, second in pairwise(marks)]


def _bytes(batch: Batch) -> int:
    return sum(value.numel() * value.element_size() for value in batch.values())
