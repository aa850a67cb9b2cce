"""One optimizer step: micro-batches, precision, the global count, clipping.

micro-batches ── task ── sums and counts ──┬── backward of sum / local batch size
└── one reduction over the ranks: [sums, counts, stop]
gradient (mean over ranks) x global batch size / global count ── clip ── optimizer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.types import Batch
from hpctrain.faults.stop import Stop
from hpctrain.tasks import Sums, Task


class Precision:
    """The precision of the forward pass.

    Args:
        compute: "fp32", or "bf16" for autocast; parameters stay float32 in both.
        device: Device of the rank.
    """

    def __init__(self, compute: str, device: torch.device) -> None:
        self.compute, self.device = compute, device

    def __call__(self) -> AbstractContextManager[object]:
        """Return a new context for one forward pass."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Totals:
    """Sums and counts over steps and ranks.

    They stay on the device, so that no step waits for it.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._total: torch.Tensor | None = None

    def add(self, names: list[str], vector: torch.Tensor) -> None:
        """Add `vector`, float64 of shape (2 * len(names),): a sum and a count for each name."""
        self.names = names
        self._total = vector if self._total is None else self._total + vector

    def reduce(self) -> None:
        """Add the totals of all ranks; for totals to which only this rank's sums were added."""
        if self._total is not None:
            _add_over_ranks(self._total)

    def means(self) -> dict[str, float]:
        """Return sum / count of each name, which waits for the device, and start from zero."""
        if self._total is None:
            return {}
        values, self._total = self._total.tolist(), None
        pairs = zip(self.names, values[::2], values[1::2], strict=True)
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Return what has been added since the last `means`, as JSON."""
        values = None if self._total is None else self._total.tolist()
        return {"names": self.names, "values": values}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from the sums that `state_dict` returned."""
        self.names, values = state["names"], state["values"]
        if values is not None:
            self._total = torch.tensor(values, dtype=torch.float64, device=device)


class TrainStep:
    """Forward, backward and update on one rank's share of a global batch.

    Args:
        model: The model, wrapped for data parallelism where there are several ranks.
        task: Computes sums and counts from a batch (`hpctrain.tasks`).
        optimizer: Updates the parameters of the model.
        precision: Makes the context of the forward pass.
        accumulate: Number of micro-batches in this rank's share; it must divide the share.
        clip_norm: Largest L2 norm of the global gradient; None does not clip.
        stop: The stop request, whose flags are reduced together with the sums.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        accumulate: int,
        clip_norm: float | None,
        stop: Stop,
    ) -> None:
        self.model, self.task, self.optimizer, self.precision = model, task, optimizer, precision
        self.accumulate, self.clip_norm, self.stop = accumulate, clip_norm, stop
        self.totals = Totals()

    def __call__(self, batch: Batch, lr: float) -> None:
        """Train on this rank's share of the global batch.

        Args:
            batch: Tensors on the device; the shares of all ranks have the same number of rows.
            lr: Learning rate of this step.
        """
        local = len(batch["mask"])
        vectors = []
        for micro, last in _split(batch, self.accumulate):
            with self._gradients_stay_local(not last), self.precision():
                sums = self.task(self.model, micro)
                # Dividing by the rows keeps the gradient in the range of the dtype. The exact
                # divisor is the global count, which is known only after the reduction below.
                (sums["loss"][0] / local).backward()
            vectors.append(to_vector(sums))
        vector = torch.stack(vectors).sum(0)
        reduced = torch.cat([vector, vector.new_tensor(self.stop.flags())])
        _add_over_ranks(reduced)
        self.stop.offer(reduced[len(vector) :])
        names = list(sums)
        self.totals.add(names, reduced[: len(vector)])
        count = reduced[2 * names.index("loss") + 1]
        self._scale_gradients(local * dist.get_world_size() / count.clamp(min=1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients_stay_local(self, local: bool) -> AbstractContextManager[object]:
        if local and isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def _scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by `factor`, shape (), and clip them, in one pass."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(gradients) * factor
            factor = factor * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


def _add_over_ranks(values: torch.Tensor) -> None:
    if dist.get_world_size() > 1:  # a reduction takes 50 us even in a group of one
        dist.all_reduce(values)


def to_vector(sums: Sums) -> torch.Tensor:
    """Return sums and counts as one detached float64 vector of shape (2 * len(sums),)."""
    flat = [value.detach().double() for pair in sums.values() for value in pair]
    return torch.stack(flat)


def _split(batch: Batch, parts: int) -> Iterator[tuple[Batch, bool]]:
    chunks = {name: values.chunk(parts) for name, values in batch.items()}
    for index in range(parts):
        yield {name: values[index] for name, values in chunks.items()}, index == parts - 1
