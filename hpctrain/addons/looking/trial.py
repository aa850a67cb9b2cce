"""A forward pass that leaves no trace: buffers, attributes, modes and random numbers stay."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from hpctrain.addons.looking.held_values import HeldValues
from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.dry_run import dry_run, stored_buffers
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel, split
from hpctrain.engine.tasks.task import Task

_Pair = tuple[float, float]


@dataclass(frozen=True)
class Tried:
    """What a pass has given on this rank.

    `sums` are a sum and a count by name: zeros where another rank has them. `buffers` are those
    that the pass has written, by name.
    """

    sums: dict[str, _Pair]
    buffers: dict[str, torch.Tensor]

    def unlike(self, other: Tried, tolerance: float) -> list[str]:
        """Return the names of which a sum or a count is another one, beyond rounding."""
        return [
            name
            for name, pair in self.sums.items()
            if name in other.sums and not near(pair, other.sums[name], tolerance)
        ]


def near(one: _Pair, other: _Pair, tolerance: float) -> bool:
    """Return whether two pairs are equal but for rounding; what is not finite tells nothing."""
    pairs = list(zip(one, other, strict=True))
    return not all(map(math.isfinite, (*one, *other))) or all(
        abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs
    )


class TrialPasses:
    """Passes of a model and its task on the first rows of a batch; all ranks make them together.

    A pass has the rows of a micro-batch, and two if that is one row. A pipeline has the whole
    batch, as its schedule is for one size.

    Attributes:
        batch: The rows of the passes.
        tolerance: What rounding may change in the sums, relative to them.
    """

    def __init__(self, model: ParallelModel, task: Task, batch: Batch) -> None:
        self._model, self._task = model, task
        count = len(batch["mask"])
        parts = model.accumulate if model.mesh.degrees.pp == 1 else 1
        if parts > 1 and count // parts < 2 and count % 2 == 0:
            parts = count // 2
        self.batch = next(split(batch, parts))[0]
        exact = model.precision.compute in ("fp32", "fp64")
        self.tolerance = 1e-5 if exact else 1e-2

    def __call__(self, batch: Batch | None = None, *, train: bool) -> Tried:
        """Return what a pass gives, in the mode for training or in that for evaluations."""
        module = self._model.module
        with self._untouched(), torch.no_grad():
            if not train:
                module.eval()
            before = {name: value.clone() for name, value in stored_buffers(module)}
            names, values = self._model.evaluate(self._task, batch or self.batch)
            numbers = values.tolist()
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            written = {
                name.removeprefix("module."): value.detach().clone()
                for name, value in stored_buffers(module)
                if name not in before or not torch.equal(value, before[name])
            }
        return Tried(dict(zip(names, pairs, strict=True)), written)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave all that the next step depends on as it is; compile nothing for these passes."""
        held = HeldValues(self._model.module, self._task)
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # which takes a second to import
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(dry_run(*self._model.roots))
            stack.enter_context(self._model.aside())
            try:
                yield
            finally:
                held.restore()


def other_rows(batch: Batch, chosen: torch.Tensor) -> Batch:
    """Return the batch with the rows `chosen`, (rows,) bool, replaced by the rows before them.

    The mask stays as it is.
    """
    rows = torch.arange(len(chosen), device=chosen.device)
    source = torch.where(chosen, rows - 1, rows) % len(chosen)

    def of(name: str, values: torch.Tensor) -> torch.Tensor:
        return values if name == "mask" else values[source.to(values.device)]

    return {name: of(name, values) for name, values in batch.items()}
