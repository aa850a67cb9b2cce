"""One optimizer step, and the sums that the steps add up.

micro-batches ── task ── sums and counts ──┬── backward (engine.parallel.wrappers.parallel_model)
                                           └── one reduction: [sums, counts, flags, loads, used]
gradient x global batch size / global count ── clip ── finite? ── optimizer
"""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from hpctrain.config.metric_registry import GRAD_NORM, SKIPPED_STEPS
from hpctrain.data.shards.types import Batch
from hpctrain.engine.checkpoint.saving.saves import Saves
from hpctrain.engine.faults.health import Health
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.layers.dry_run import BufferValues
from hpctrain.engine.loop.schedule import rate_ratios, set_rates
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.micro_batches import MicroBatches
from hpctrain.engine.parallel.reducing.scalars import divisor, joined, on_device, reordered
from hpctrain.engine.parallel.reducing.unused import Unused
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.parts.average import Average
from hpctrain.engine.parts.silent_layers import SilentLayers
from hpctrain.engine.parts.timer import Timer
from hpctrain.engine.tasks.task import Task, at_step, derived


class Totals:
    """Sums and counts over steps and ranks; `counts` are what the last `means` has divided by."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.counts: dict[str, float] = {}
        self._total: torch.Tensor | None = None

    def add(self, names: list[str], values: torch.Tensor) -> None:
        """Add a sum and a count for each name."""
        if self._total is not None and names != self.names:
            # A resumed run with other degrees may have other names, such as that of the bubble.
            self._total = reordered(self._total, self.names, names)
        self.names = names
        self._total = values if self._total is None else self._total + values

    def reduce(self, mesh: Mesh) -> None:
        """Add the totals of all ranks; for totals to which only this rank's sums were added."""
        if self._total is not None:
            mesh.add(self._total)

    def means(self) -> dict[str, float]:
        """Return sum / count of each name, which waits for the device, and start from zero."""
        if self._total is None:
            self.counts = {}
            return {}
        values, self._total = self._total.tolist(), None
        pairs = list(zip(self.names, values[::2], values[1::2], strict=True))
        self.counts = {name: count for name, _, count in pairs}
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    def state_dict(self) -> dict[str, Any]:
        """Return what has been added since the last `means`, as JSON."""
        values = None if self._total is None else self._total.tolist()
        return {"names": self.names, "values": values}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from the sums that `state_dict` returned."""
        self.names, values = state["names"], state["values"]
        if values is not None:
            self._total = on_device(values, device)


class TrainStep:
    """Forward, backward and update on one rank's share of a global batch.

    `clip_norm` is the largest L2 norm of the global gradient; None does not clip. `base_lr` is the
    learning rate that the optimizer was made with: groups of parameters with another one keep the
    ratio to it; None lets all have the same. `parts` are the micro-batches for each number of rows
    that a batch of this rank may have; empty if all steps have the same number. The flags of the
    stop request are reduced together with the sums, and so are those of `save_timer` and `saving`
    (checkpoints). `grad_norm` is the norm of the global gradient before
    clipping.
    """

    def __init__(
        self,
        model: ParallelModel,
        task: Task,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        stop: Stop,
        health: Health | None = None,
        micro_batches: MicroBatches | None = None,
        base_lr: float | None = None,
        average: Average | None = None,
        save_timer: Timer | None = None,
        saving: Saves | None = None,
        silent: SilentLayers | None = None,
        parts: Mapping[int, int] | None = None,
    ) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self.micro_batches = micro_batches
        self.clip_norm, self.stop, self.health = clip_norm, stop, health or Health()
        groups = optimizer.param_groups
        self._ratios = rate_ratios(optimizer, base_lr) if base_lr else [1.0] * len(groups)
        self.average = average or Average(model)
        self.save_timer = save_timer or Timer()
        self.saving = saving
        self.silent = silent or SilentLayers()
        self.parts, self._rows = parts or {}, 0
        # What a forward pass changes beside gradients, such as the statistics of a batch norm.
        self._buffers = BufferValues(*[model.module] * self.health.undoes)
        self.totals = Totals()
        self.grad_norm: float | torch.Tensor = math.nan

    def __call__(self, batch: Batch, lr: float) -> None:
        """Train on this rank's share of the global batch.

        The batch is on the device: a rank has the rows of `mesh.weight` shares. A group of
        parameters may have a multiple of the learning rate.
        """
        mesh, precision = self.model.mesh, self.model.precision
        if self.parts and len(batch["mask"]) != self._rows:
            self._resize(len(batch["mask"]))
        self._buffers.keep()
        at_step(self.task, self.model.step)
        names, values = self.model.forward_backward(self.task, batch)
        asking: list[Stop | Timer | Saves | Unused] = [self.stop, self.save_timer]
        asking += [each for each in (self.saving, self.model.unused) if each is not None]
        flags = [each.flags() for each in asking]
        reduced = self.model.loads.joined(joined(values, [*chain(*flags)]))
        mesh.add(reduced)
        sums, rest = reduced[: len(values)], reduced[len(values) :]
        for each, own in zip(asking, flags, strict=True):
            each.offer(rest[: len(own)])
            rest = rest[len(own) :]
        balanced = self.model.loads.balance(rest, names, sums)
        place = 2 * names.index("loss")
        loss, count = sums[place], sums[place + 1]
        # The gradient is a mean over the ranks of sums / rows; it becomes the sum / global count.
        rows = len(batch["mask"]) // mesh.weight
        factor = rows * mesh.dp_cp_size / divisor(count) / precision.scale
        self.silent.take(self.model)
        self.grad_norm = self.model.scale_gradients(factor, self.clip_norm)
        fits = precision.accepts(loss, self.grad_norm)
        # An overflow of fp16 is no fault, and replicas that differ have norms of their own.
        judged = (fits or precision.exhausted) and not self.model.replicas_differ
        norm = self.grad_norm if judged else None
        healthy = self.health.accepts(loss, norm, values[place], count)
        if healthy:
            self.totals.add(*balanced)
        else:
            self._buffers.restore()
        if fits and healthy:
            set_rates(self.optimizer, lr, self._ratios)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.after_step()
        if fits and healthy:
            self.average.update()
        if self.micro_batches is not None:
            self.micro_batches.after_step()

    def means(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call, which waits for the device."""
        means = derived(self.task, self.totals.means())
        if math.isnan(means.get("bubble", 0.0)):  # the first step of a pipeline measures none
            del means["bubble"]
        found = {f"train/{name}": value for name, value in means.items()}
        skipped = {SKIPPED_STEPS: self.health.skipped} if self.health.skipped else {}
        return found | {GRAD_NORM: float(self.grad_norm)} | skipped

    def finish(self) -> None:
        """Make the replicas equal after the last step of the run."""
        self.model.finish()
        self.average.finish()

    def _resize(self, rows: int) -> None:
        """Divide batches of `rows` rows from now on, because a stage of the ramp has begun."""
        self._rows, self.model.accumulate = rows, self.parts[rows]
        if self.micro_batches is not None:
            self.micro_batches.resize(rows)
