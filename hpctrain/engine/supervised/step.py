"""One optimizer step, and the sums that the steps add up.

micro-batches ── task ── sums and counts ──┬── backward (engine.parallel.wrappers.parallel_model)
                                           └── one reduction: [sums, counts, flags, loads, used]
gradient x global batch size / global count ── clip ── finite? ── optimizer
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.config.metric_registry import GRAD_NORM, LR, SKIPPED_STEPS
from hpctrain.data.shards.types import Batch
from hpctrain.engine.faults.health import Health
from hpctrain.engine.layers.dry_run import BufferValues
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.reducing.scalars import (
    Exchange,
    Numbers,
    added,
    listed,
    on_device,
    on_host,
    over,
    reordered,
    tensor_of,
)
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part, overriding
from hpctrain.engine.supervised.schedule import rate_ratios, set_rates
from hpctrain.engine.tasks.task import Task, at_step, derived


class Totals:
    """Sums and counts over steps and ranks; `counts` are what the last `means` has divided by."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: dict[str, float] = {}
        self._total: Numbers | None = None

    def add(self, names: list[str], values: Numbers) -> None:
        """Add a sum and a count for each name."""
        values = values if isinstance(values, list) else on_host(values)
        if self._total is not None and names != self.names:
            # A task may change its names; so may a run that another version has begun.
            self._total = reordered(self._total, self.names, names)
        self.names = names
        self._total = values if self._total is None else added([self._total, values])

    def reduce(self, mesh: Mesh) -> None:
        """Add the totals of all ranks; for totals to which only this rank's sums were added."""
        if self._total is not None:
            total = tensor_of(self._total)
            mesh.add(total)
            self._total = on_host(total)

    def means(self) -> dict[str, float]:
        """Return sum / count of each name, which waits for the device, and start from zero."""
        if self._total is None:
            self.counts = {}
            return {}
        values, self._total = listed(self._total), None
        pairs = list(zip(self.names, values[::2], values[1::2], strict=True))
        self.counts = {name: count for name, _, count in pairs}
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Return what has been added since the last `means`, as JSON."""
        values = None if self._total is None else listed(self._total)
        return {"names": self.names, "values": values}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from the sums that `state_dict` returned."""
        self.names, values = state["names"], state["values"]
        if values is not None:
            self._total = values if device.type == "cpu" else on_device(values, device)


class TrainStep(Part):
    """Forward, backward and update on one rank's share of a global batch.

    The flags of parts are reduced together with the sums, in `exchange`. It is a part itself, with
    the sums that the steps since the last report have added up.

    `clip_norm` is the largest L2 norm of the global gradient; None does not clip. `base_lr` is the
    learning rate that the optimizer was made with: groups of parameters with another one keep the
    ratio to it; None lets all have the same.

    Attributes:
        grad_norm: The norm of the global gradient of the last step, before clipping.
    """

    name = "totals"

    def __init__(
        self,
        model: ParallelModel,
        task: Task,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        health: Health | None = None,
        *,
        clip_norm: float | None = None,
        base_lr: float | None = None,
    ) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self._clip_norm, self.exchange, self.health = clip_norm, exchange, health or Health()
        same = [1.0] * len(optimizer.param_groups)
        self._ratios = rate_ratios(optimizer, base_lr) if base_lr else same
        # What a forward pass changes beside gradients, such as the statistics of a batch norm.
        self._buffers = BufferValues(model.module) if self.health.undoes else None
        self.totals = Totals()
        self.grad_norm: float | torch.Tensor = math.nan
        self._lr = math.nan
        self.use(())

    def use(self, parts: Sequence[Part]) -> None:
        """Let parts look at the gradients of each step, and follow the updates."""
        # Only their methods are kept: a part may hold this step, and a circle would keep the model.
        self._after_backward = overriding(parts, "after_backward")
        self._after_update = overriding(parts, "after_update")

    def __call__(self, batch: Batch, lr: float) -> None:
        """Train on this rank's share of the global batch.

        The batch is on the device: a rank has the rows of `mesh.weight` shares. A group of
        parameters may have a multiple of the learning rate.
        """
        mesh, precision = self.model.mesh, self.model.precision
        self._lr = lr
        if self._buffers is not None:
            self._buffers.keep()
        at_step(self.task, self.model.step)
        names, values = self.model.forward_backward(self.task, batch)
        loads = self.model.loads
        sums, rest = self.exchange.reduce(values, *([loads.joined] if loads else ()))
        balanced = loads.balance(rest, names, sums) if loads else (names, sums)
        place = 2 * names.index("loss")
        loss, count = sums[place], sums[place + 1]
        # The gradient is a mean over the ranks of sums / rows; it becomes the sum / global count.
        rows = batch["mask"].shape[0] // mesh.weight
        factor = over(rows * mesh.dp_cp_size / precision.scale, count)
        for look in self._after_backward:
            look()
        self.grad_norm = self.model.scale_gradients(factor, self._clip_norm)
        fits = precision.accepts(loss, self.grad_norm, count)
        # An overflow of fp16 is no fault, and replicas that differ have norms of their own.
        judged = (fits or precision.exhausted) and not self.model.replicas_differ
        norm = self.grad_norm if judged else None
        healthy = self.health.accepts(loss, norm, values[place], count)
        if healthy:
            self.totals.add(*balanced)
        elif self._buffers is not None:
            self._buffers.restore()
        updates = fits and healthy
        if updates:
            set_rates(self.optimizer, lr, self._ratios)
            self.optimizer.step()
        self._drop_gradients()
        self.model.after_step()
        if updates:
            for follow in self._after_update:
                follow()

    def _drop_gradients(self) -> None:
        """Do as `zero_grad` of torch's optimizers does, without its record for a profiler."""
        if type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def report(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call, which waits for the device."""
        means = derived(self.task, self.totals.means())
        found = {f"train/{name}": value for name, value in means.items()}
        skipped = {SKIPPED_STEPS: self.health.skipped} if self.health.skipped else {}
        return found | {GRAD_NORM: float(self.grad_norm)} | skipped | {LR: self._lr}

    def begin(self, step: int) -> None:
        """Go on after a global step."""
        self.model.step = step

    def finish(self) -> None:
        """Make the replicas equal after the last step of the run."""
        self.model.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last report, as JSON."""
        return self.totals.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.totals.load_state_dict(state, self.model.mesh.device)
