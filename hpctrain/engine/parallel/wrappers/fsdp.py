"""Sharded data parallel by FSDP2: each rank keeps a part of every parameter.

    zero  divided           gradients are reduced       parameters are gathered
    1     optimizer state   after the last micro-batch  once per step
    2     and gradients     after every micro-batch     once per step
    3     and parameters    after every micro-batch     in each pass

These are the stages of ZeRO (Rajbhandari et al. 2020). The three are settings of one wrapper, so
that checkpoints, norms and initialisation are the same for all. Stages 1 and 2 also keep the
divided parameters beside the gathered ones.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.ties import ties
from hpctrain.engine.parallel import second_gradients
from hpctrain.engine.parallel.preparing.whole_model import undivided
from hpctrain.engine.parallel.reducing.lockstep import Lockstep
from hpctrain.engine.parallel.reducing.scalars import Numbers
from hpctrain.engine.parallel.reducing.unused import Unused
from hpctrain.engine.parallel.second_gradients import collect_grad_tensors
from hpctrain.engine.parallel.setup import Setup
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.tasks.task import Task

log = logging.getLogger(__name__)
_ExpertRanks = Sequence[tuple[nn.Module, DeviceMesh]]


class FSDPModel(ParallelModel):
    """A model whose blocks, and what is outside of them, were divided by `shard`."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        mesh, config = setup.mesh, setup.parallel
        super().__init__(module, setup)
        assert isinstance(module, FSDPModule)
        self._root, self._zero, self._every = module, config.zero, config.sync == "every"
        if config.sync == "auto" and (mesh.degrees.dp_shard > 1 or config.fsdp.offload):
            self._every = config.zero > 1
        named = dict(module.named_modules())
        names = [name for name, m in named.items() if name and isinstance(m, FSDPModule)]
        self._lockstep = None
        # Experts that are divided by themselves are blocks within blocks, which no rank skips.
        if not any(name.startswith(f"{outer}.") for name in names for outer in names):
            blocks = {name: named[name] for name in names}
            self._lockstep = Lockstep(
                module, blocks, mesh.stage_group, mesh.device, always=config.fsdp.agree
            )
        whole, ranks = undivided(module), mesh.data_mesh
        self.unused = self._unused = Unused(module, whole, ranks, self._lockstep, self.parameters)
        self._whole, self._averages = bool(whole), False

    def forward_backward(self, task: Task, batch: Batch) -> tuple[list[str], Numbers]:
        """Add the gradient of the loss per row of a share; reduce it over the ranks."""
        sums = super().forward_backward(task, batch)
        self._unused.average()
        return sums

    def evaluate(self, task: Task, batch: Batch) -> tuple[list[str], torch.Tensor]:
        """Return the names and sums of a forward pass."""
        if self._lockstep is not None:
            self._lockstep.start(train=False)
        # A model may compute gradients in an evaluation, too, such as forces. Its class may be
        # hidden (`in_plain_classes`).
        FSDPModule.set_requires_gradient_sync(self._root, False)
        return super().evaluate(task, batch)

    def serve_calls(self) -> None:
        """Let a loop of one's own call the module: hooks do what `forward_backward` does."""
        if self._lockstep is not None:
            self._lockstep.learns_always = True
        self._root.register_forward_hook(self._called)

    def begin_step(self) -> None:
        """Begin a step, whose passes have the order of those of the steps before."""
        if self._lockstep is not None:
            self._lockstep.start(train=False)
            self._lockstep.start(train=True)

    def before_update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remove the gradients of the parameters that no rank has used."""
        self._unused.settle(parameters, self.mesh)

    def _called(self, _: nn.Module, __: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            self.free_gathered()  # no backward pass does so, and an update would not be seen
        for tensor in collect_grad_tensors(outputs) if self._whole else ():
            tensor.register_hook(self._reached)

    def _reached(self, _: torch.Tensor) -> None:
        if not self._averages and not second_gradients.is_first():
            self._averages = True
            Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        self._averages = False
        self._unused.average()

    def aside(self) -> AbstractContextManager[object]:
        """Return a context after which the order of the blocks is as unknown as before."""
        return self._lockstep.aside() if self._lockstep is not None else nullcontext()

    def _reduced(self, last: bool) -> AbstractContextManager[object]:
        if self._lockstep is not None:
            self._lockstep.start(train=True)
        self._root.set_requires_gradient_sync(last or self._every)
        # Below ZeRO 3, parameters are gathered once in a step and freed after its last micro-batch.
        if self._zero < 3:
            self._root.set_reshard_after_backward(last)
        # Ranks of a replica reduce after every micro-batch; the replicas are added once in a step.
        self._root.set_requires_all_reduce(last)
        self._root.set_is_last_backward(last)
        return nullcontext()


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], setup: Setup, experts: _ExpertRanks
) -> None:
    """Divide each block, then the rest of the model, over `mesh.data_mesh`, in place.

    If dp_shard is 1 they stay whole, and only their gradients are reduced. The parameters of a
    block are gathered together. `experts` are the modules that hold experts which expert parallel
    has divided, and the ranks that have the same ones. If the model is compiled, it keeps the
    attributes by which the compiler knows FSDP2.
    """
    mesh, precision, config = setup.mesh, setup.precision, setup.parallel
    fsdp, on_gpu = config.fsdp, precision.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if fsdp.offload else OffloadPolicy()
    dtype = precision.autocast if precision.autocast != precision.params else None
    options: dict[str, Any] = {
        "mesh": mesh.data_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=precision.reduce),
        "offload_policy": offload,
        "ignored_params": set(undivided(model)),
    }
    blocks = _separate(model, blocks)
    if mesh.degrees.dp_shard == 1 and not fsdp.offload:
        # DDP knows neither the parameters of tensor parallel nor the passes of a pipeline.
        for module, ranks in experts:
            replicate(module, **(options | {"mesh": ranks}))
        for module in (*blocks, model):
            replicate(module, **options)
        return
    within: bool | int = config.zero == 3
    if within and fsdp.reshard_after_forward != mesh.degrees.dp_shard * mesh.degrees.cp:
        within = fsdp.reshard_after_forward or True
    for module, ranks in experts:
        given = options | _divided_over(ranks)
        fully_shard(module, reshard_after_forward=config.zero == 3, **given)
    options |= _divided_over(mesh.data_mesh)
    for block in blocks:
        fully_shard(block, reshard_after_forward=within, **options)
    # What is outside of the blocks is needed first in the backward pass, so it stays gathered.
    fully_shard(model, reshard_after_forward=None if within is True else within, **options)
    if setup.train.compile == "off":
        _forget_wrapper(model)


_OF_FSDP = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def _forget_wrapper(model: nn.Module) -> None:
    """Remove the attributes by which a model could know that FSDP2 has divided it, in place.

    Only the compiler needs them. Models of transformers that find them train otherwise: those with
    LayerDrop keep the output of a layer that they have dropped, so that all ranks call all layers.
    Here ranks may skip blocks (`Lockstep`).
    """
    for module in model.modules():
        for name in _OF_FSDP:
            vars(module).pop(name, None)


@contextmanager
def in_plain_classes(model: nn.Module) -> Iterator[None]:
    """Hide from the modules of a model, within this context, that FSDP2 has divided it."""
    kinds = [(m, type(m)) for m in model.modules() if isinstance(m, FSDPModule)]
    held = [(m, {k: vars(m)[k] for k in _OF_FSDP if k in vars(m)}) for m in model.modules()]
    _forget_wrapper(model)
    module: nn.Module
    for module, kind in kinds:
        module.__class__ = kind.__bases__[-1]  # FSDP2 makes a class of FSDPModule and this one
    try:
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
        for module, attributes in held:
            vars(module).update(attributes)


def _separate(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with others: FSDP2 groups each only once."""
    shared = [(first, *others) for first, others in ties(model)]
    names = {id(module): name for name, module in model.named_modules()}
    separate: list[nn.Module] = []
    together: list[nn.Module] = []
    for block in blocks:
        within = [[n.startswith(f"{names[id(block)]}.") for n in same] for same in shared]
        apart = all(all(inside) or not any(inside) for inside in within)
        (separate if apart else together).append(block)
    if together and dist.get_rank() == 0:
        log.info(
            "%s: they share a parameter with other modules, so they are gathered with the rest of "
            "the model",
            ", ".join(names[id(block)] for block in together),
        )
    return separate


def _divided_over(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the mesh, and which dimension of a parameter its last dimension divides."""
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        # A tensor of experts has few rows. Ranks without a row would pad theirs.
        if parameter.ndim != 3 or parameter.shape[1] % ranks:
            return None
        uneven = isinstance(parameter, DTensor) or parameter.shape[0] % ranks
        return Shard(1) if uneven else None

    return {"mesh": mesh, "shard_placement_fn": placement}
