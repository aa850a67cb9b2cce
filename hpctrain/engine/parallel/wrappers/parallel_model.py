"""A model on the ranks of a mesh: forward and backward passes, and the global gradient.

    batch of this rank ── micro-batches ── task ── sums ── backward of sum / rows ── gradient
    gradient (mean over the data-parallel ranks) x rows x dp / count ── norm ── clip

The class here is for a model that one rank holds alone. `ddp`, `fsdp` and `pipeline` have the
others, which change how gradients are reduced.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.distributed.tensors import local
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import wide_batch
from hpctrain.engine.parallel.preparing.summary import ModelSummary
from hpctrain.engine.parallel.preparing.whole_model import Setting
from hpctrain.engine.parallel.reducing.scalars import (
    Number,
    Numbers,
    added,
    flat,
    is_late,
    tensor_of,
)
from hpctrain.engine.parallel.setup import Setup
from hpctrain.engine.tasks.task import Task, checked

if TYPE_CHECKING:
    from hpctrain.engine.parallel.reducing.expert_loads import Loads
    from hpctrain.engine.parallel.reducing.unused import Unused


_NO_GRADIENT = (
    "the sum of the task's loss has no gradient: it does not depend on a parameter that is "
    "trained. Is it computed with .detach(), .item(), argmax or NumPy, or are all parameters "
    "frozen?"
)


class ParallelModel:
    """A model, the mesh that it is spread over, and its precision.

    Its `parameters` are those of `module` that are trained, each once, whole or sharded, with their
    `names` in the plain model. They are listed when the object is made, because FSDP2 exchanges
    those of the module during a pass. `accumulate`, the number of micro-batches, must divide a
    rank's share of a batch.

    Attributes:
        settings: What the config says about parameters, by name; empty if it says nothing.
        summary: The summary of the whole model; None if it was not made by the recipe.
        loads: The loads of its experts; None if it has none.
        unused: What lets the optimizer leave out the parameters that no rank has used in a step,
            where this needs to be told; None elsewhere.
    """

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        self.module, self.mesh, self.precision = module, setup.mesh, setup.precision
        self.accumulate, self.step = setup.accumulate, 0
        prefix = "module." if isinstance(module, DistributedDataParallel) else ""
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names = [name.removeprefix(prefix) for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        divided = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._divided = divided or self.mesh.degrees.pp > 1
        self.settings: Mapping[str, Setting] = {}
        self.summary: ModelSummary | None = None
        self.loads: Loads | None = None
        self.unused: Unused | None = None
        self._loss: Callable[[], AbstractContextManager[object]] = nullcontext
        if setup.divided_loss:
            from torch.distributed.tensor.parallel import loss_parallel

            self._loss = loss_parallel

    def forward_backward(self, task: Task, batch: Batch) -> tuple[list[str], Numbers]:
        """Add the gradient of the loss per row of a share; reduce it over the ranks.

        The batch has tensors on the device: a rank has the rows of `mesh.weight` shares. Returns
        the names of the task's sums, and for each of them this rank's sum and count.
        """
        rows = batch["mask"].shape[0] // self.mesh.weight  # all ranks divide by the same number
        if self.loads is not None:
            self.loads.start()
        parts = []
        for micro, last in split(wide_batch(batch), self.accumulate):
            with self._reduced(last), self._loss():
                with self.precision.forward():
                    sums = checked(task(self.module, micro))
                if not sums["loss"][0].requires_grad:
                    raise ConfigError(_NO_GRADIENT)
                # Dividing by the rows keeps the gradient in the range of the dtype. The exact
                # divisor is the global count, which is known only after the step's reduction.
                loss = sums["loss"][0]
                loss.backward(torch.full_like(loss, self.precision.scale / rows))
            parts.append(flat(sums))
        if self.mesh.degrees.tp > 1:
            from hpctrain.engine.parallel.dividing.tensor import whole_gradients

            whole_gradients(self.parameters)
        return list(sums), self._counted(added(parts))

    def evaluate(self, task: Task, batch: Batch) -> tuple[list[str], torch.Tensor]:
        """Return the names and sums of a forward pass, as a tensor on the device."""
        with torch.no_grad(), self._loss(), self.precision.forward():
            sums = checked(task(self.module, wide_batch(batch)))
        return list(sums), tensor_of(self._counted(flat(sums)))

    def aside(self) -> AbstractContextManager[object]:
        """Return a context whose evaluations leave nothing that later passes depend on."""
        return nullcontext()

    @torch.no_grad()
    def scale_gradients(self, factor: Number, clip_norm: float | None) -> Number:
        """Multiply the gradients by `factor`, then clip their global L2 norm; None does not clip.

        Returns the norm before clipping, the same on all ranks: a float on a CPU.
        """
        own = [gradient for p in self.parameters if (gradient := p.grad) is not None]
        if self._divided:
            counts, own = _copies(own, self.mesh), [local(gradient) for gradient in own]
            total = _norm_of_parts(own, counts, self.mesh)
        elif own:
            # As torch.nn.utils.get_total_norm, which also sorts them by dtype and device.
            total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
        else:
            total = torch.zeros((), device=self.mesh.device)
        if is_late(factor):
            return _scaled_on_gpu(own, factor, total, clip_norm)
        # As there, to the last bit: torch divides a number by a tensor so.
        value = float(factor)
        length = value * total.item()
        if clip_norm is not None:
            value *= min(1 / (length + 1e-6) * clip_norm, 1.0)
        if own:
            torch._foreach_mul_(own, torch.tensor(value, dtype=own[0].dtype.to_real()))
        return length

    def begin_step(self) -> None:
        """Begin a step of a loop that calls `module` and `backward` itself; see `own_loop`."""

    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Finish the gradients that such a loop has computed, before an optimizer takes them."""

    @property
    def roots(self) -> list[nn.Module]:
        """The modules that are called for a pass: one, or the stages of this rank."""
        return [self.module]

    def free_gathered(self) -> None:
        """Free what a pass has gathered of divided parameters, because they have been changed."""
        for root in self.roots:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def share_buffers(self) -> None:
        """Give the buffers of the first rank, such as the statistics of a batch norm, to all.

        Each rank computes those of its own samples. An evaluation and a checkpoint need one value.
        DDP does the same before each forward pass, FSDP2 never does.
        """
        if self.mesh.dp_size > 1 and not self.replicas_differ:
            # All ranks make the group, also those of a stage without buffers.
            group = self.mesh.stage_group
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group=group, group_src=0)

    @property
    def layout(self) -> dict[str, int]:
        """The degrees of parallelism, without those that are 1."""
        return {name: size for name, size in vars(self.mesh.degrees).items() if size > 1}

    @property
    def replicas_differ(self) -> bool:
        """Whether every rank has parameters and an optimizer state of its own."""
        return False

    def after_step(self) -> None:
        """Count the step that the optimizer has made, and do what is due after it."""
        self.step += 1

    def finish(self) -> None:
        """Make the replicas equal after the last step of the run."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return tensors of this rank, other than the model, that the next step depends on."""
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with what `state_dict` of the same rank returned, on any device."""

    def _counted(self, values: Numbers) -> Numbers:
        """Return the sums of this rank; zeros if another rank has the same ones."""
        if self.mesh.is_counted:
            return values
        if isinstance(values, torch.Tensor):
            return torch.zeros_like(values)
        return [0.0] * len(values)

    def _reduced(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch, which decides whether gradients are reduced."""
        return nullcontext()


def _scaled_on_gpu(
    own: list[torch.Tensor], factor: torch.Tensor, total: torch.Tensor, clip_norm: float | None
) -> torch.Tensor:
    norm = factor * total
    if clip_norm is not None:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for device in {g.device for g in own}:  # offload leaves undivided parameters on the GPU
        same = [g for g in own if g.device == device]
        torch._foreach_mul_(same, factor.to(device, same[0].dtype.to_real()))
    return norm


def _norm_of_parts(own: Sequence[torch.Tensor], counts: Sequence[int], mesh: Mesh) -> torch.Tensor:
    """Return the L2 norm of the gradients of the whole model, of which a rank has its own parts.

    Every rank adds its part of the squares, divided by the number of ranks that add the same.
    """
    alike: dict[int, list[torch.Tensor]] = {}
    for gradient, count in zip(own, counts, strict=True):
        alike.setdefault(count, []).append(gradient)
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for count, tensors in alike.items():
        norm = torch.nn.utils.get_total_norm(tensors)
        squares += (norm.double() ** 2 / count).to(mesh.device)
    mesh.add(squares)
    return squares.sqrt()


def _copies(gradients: Sequence[torch.Tensor], mesh: Mesh) -> list[int]:
    """Return the number of ranks that have the same elements of each gradient.

    It need not be divided as its parameter is: that of a table may be whole on every rank. Few
    layouts occur, and a look at one is a dozen calls, which a step would make for each gradient.
    """
    ranks = mesh.degrees.ranks // mesh.degrees.pp
    known: dict[Any, int] = {}
    counts = []
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            counts.append(ranks)
            continue
        layout = id(gradient.device_mesh), gradient.placements
        if layout not in known:
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            parts = math.prod(size for size, place in sizes if not place.is_replicate())
            known[layout] = ranks // parts
        counts.append(known[layout])
    return counts


def split(batch: Batch, parts: int) -> Iterator[tuple[Batch, bool]]:
    """Yield the micro-batches of a batch, and for each whether it is the last one."""
    if parts == 1:
        yield batch, True
        return
    chunks = {name: values.chunk(parts) for name, values in batch.items()}
    for index in range(parts):
        yield {name: values[index] for name, values in chunks.items()}, index == parts - 1
