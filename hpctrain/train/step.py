"""One optimizer step, and the sums that the steps add up.

micro-batches ── task ── sums and counts ──┬── backward (hpctrain.parallel.model)
                                           └── one reduction: [sums, counts, stop, loads, used]
gradient x global batch size / global count ── clip ── optimizer
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hpctrain.data.types import Batch
from hpctrain.faults.stop import Stop
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.micro_batches import MicroBatches
from hpctrain.parallel.model import ParallelModel
from hpctrain.parallel.scalars import (
    Scalar,
    Scalars,
    added,
    at_least,
    joined,
    on_device,
    over_ranks,
    reordered,
)
from hpctrain.tasks import Task


class Totals:
    """Sums and counts over steps and ranks."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._total: Scalars | None = None

    def add(self, names: list[str], values: Scalars) -> None:
        """Add a sum and a count for each name."""
        if self._total is not None and names != self.names:
            # A resumed run with other degrees may have other names, such as that of the bubble.
            self._total = reordered(self._total, self.names, names)
        self.names = names
        self._total = values if self._total is None else added(self._total, values)

    def reduce(self, mesh: Mesh) -> None:
        """Add the totals of all ranks; for totals to which only this rank's sums were added."""
        if self._total is not None:
            self._total = over_ranks(self._total, mesh)

    def means(self) -> dict[str, float]:
        """Return sum / count of each name, which waits for the device, and start from zero."""
        if self._total is None:
            return {}
        values, self._total = _list(self._total), None
        pairs = zip(self.names, values[::2], values[1::2], strict=True)
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Return what has been added since the last `means`, as JSON."""
        values = None if self._total is None else _list(self._total)
        return {"names": self.names, "values": values}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from the sums that `state_dict` returned."""
        self.names, values = state["names"], state["values"]
        if values is not None:
            self._total = on_device(values, device)


def _list(values: Scalars) -> list[float]:
    return values if isinstance(values, list) else values.tolist()


class TrainStep:
    """Forward, backward and update on one rank's share of a global batch.

    Args:
        model: The model on the ranks of its mesh.
        task: Computes sums and counts from a batch (`hpctrain.tasks`).
        optimizer: Updates the parameters of the model.
        clip_norm: Largest L2 norm of the global gradient; None does not clip.
        stop: The stop request, whose flags are reduced together with the sums.
        micro_batches: Changes the size of micro-batches; None keeps it.

    Attributes:
        totals: The sums since the last report.
        grad_norm: The norm of the global gradient before clipping; NaN when the last step did not
            need it.
    """

    def __init__(
        self,
        model: ParallelModel,
        task: Task,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        stop: Stop,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self.micro_batches = micro_batches
        self.clip_norm, self.stop = clip_norm, stop
        self.totals = Totals()
        self.grad_norm: Scalar = math.nan

    def __call__(self, batch: Batch, lr: float) -> None:
        """Train on this rank's share of the global batch.

        Args:
            batch: Tensors on the device. A rank has the rows of `mesh.weight` shares.
            lr: Learning rate of this step.
        """
        mesh, precision = self.model.mesh, self.model.precision
        names, values = self._forward_backward(batch)
        flags = self.stop.flags()
        mine = self.model.joined(self.model.loads.joined(joined(values, flags)))
        reduced = self.model.settled(over_ranks(mine, mesh))
        sums, rest = reduced[: len(values)], reduced[len(values) :]
        self.stop.offer(rest[: len(flags)])
        self.totals.add(*self.model.loads.balance(rest[len(flags) :], names, sums))
        count = sums[2 * names.index("loss") + 1]
        # The gradient is a mean over the ranks of sums / rows; it becomes the sum / global count.
        rows = len(batch["mask"]) // mesh.weight
        factor = rows * mesh.averaged / at_least(count, 1) / precision.scale
        self.grad_norm = self.model.scale_gradients(factor, self.clip_norm)
        if precision.accepts(self.grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.after_step()
        if self.micro_batches is not None:
            self.micro_batches.after_step()

    def _forward_backward(self, batch: Batch) -> tuple[list[str], Scalars]:
        while True:
            try:
                return self.model.forward_backward(self.task, batch)
            except torch.OutOfMemoryError:
                if self.micro_batches is None or not self.micro_batches.lower():
                    raise
