"""Data parallel: every rank has the whole model, and gradients are averaged while they appear.

With local SGD the replicas train by themselves, and are averaged every so many steps:

    each step                 each replica takes its own gradient
    every `every` steps       change = common parameters - mean of the replicas
                              momentum = outer_momentum * momentum + change
                              common parameters -= outer_lr * (change + outer_momentum * momentum)
                              every replica continues from the common parameters

Stich, "Local SGD Converges Fast and Communicates Little" (2019); with momentum
Douillard et al., "DiLoCo" (2023). The optimizer state of each replica stays its own.
"""

# Annotations are not postponed here, because torch looks at those of a hook.
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.base import offered
from hpctrain.engine.distributed.tensors import is_released
from hpctrain.engine.parallel.setup import Setup
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel


class DDPModel(ParallelModel):
    """A model in torch's DistributedDataParallel (Li et al. 2020)."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        precision, options = setup.precision, setup.parallel.ddp
        if released := [name for name, p in module.named_parameters() if is_released(p)]:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, released)
        ddp = DistributedDataParallel(
            module,
            init_sync=False,  # `fill` has given all ranks the same values
            device_ids=[precision.device.index] if precision.device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_mb,
            gradient_as_bucket_view=True,  # which saves a copy and its memory
            find_unused_parameters=options.find_unused_parameters,
        )
        if precision.reduce != precision.params:
            ddp.register_comm_hook(precision.reduce, _average_as)
        super().__init__(ddp, setup)
        self._ddp, self._every = ddp, setup.parallel.sync == "every"
        self._local = setup.train.local_sgd
        self._compression: Any = None
        if setup.train.compression.kind != "none":
            compressed = offered.PowerSGD
            self._compression = compressed(setup.train.compression.rank, module.named_parameters())
            ddp.register_comm_hook(self._compression, compressed.reduce)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the compression."""
        return self._compression.state_dict() if self._compression is not None else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with what `state_dict` of the same rank returned."""
        if self._compression is not None:
            self._compression.load_state_dict(state)

    def begin_step(self) -> None:
        """Give the buffers of the first rank to all.

        DDP does so before each pass. If a step has several, such as those of a GAN, this changes
        what the backward pass of the one before needs, so torch refuses it.
        """
        self._ddp.require_forward_param_sync = True
        if self._ddp.will_sync_module_buffers():
            self._ddp._sync_buffers()
        self._ddp.require_forward_param_sync = False

    def _reduced(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or self._every else self._ddp.no_sync()


class LocalSGDModel(DDPModel):
    """Replicas whose parameters, instead of their gradients, are averaged.

    The factor of the gradient stays that of DDP: this rank's sum of losses x ranks / global count.
    So the mean of the replicas' gradients is the global gradient, even where the ranks have
    different counts. Where all have the same, it is the gradient of the local mean. The factor
    needs the sums of all ranks: some bytes in each step, which the stop request needs anyway.

    `scale_gradients` clips each replica's own gradient and returns its norm.
    """

    # What the replicas have in common; there is none as long as gradients are reduced.
    _common: list[torch.Tensor] | tuple[torch.Tensor, ...] = ()
    _momentum: list[torch.Tensor] | tuple[torch.Tensor, ...] = ()

    @property
    def replicas_differ(self) -> bool:
        """Whether the ranks have taken steps by themselves; their optimizer states differ, too."""
        return bool(self._common)

    def _reduced(self, last: bool) -> AbstractContextManager[object]:
        if not self._common:
            common = [p.detach().clone() for p in self.parameters]
            self._begin(common, [torch.zeros_like(p) for p in common])
        return self._ddp.no_sync()

    def _begin(self, common: list[torch.Tensor], momentum: list[torch.Tensor]) -> None:
        """Let the replicas differ from now on, also in an evaluation before the first step."""
        self._common, self._momentum = common, momentum
        # DDP would give the buffers of rank 0 to all, such as the statistics of a batch norm.
        self._ddp.require_forward_param_sync = False

    def after_step(self) -> None:
        """Count the step, and average the replicas if it is time."""
        super().after_step()
        if self._common and self._since_average == 0:
            self._average()

    def finish(self) -> None:
        """Average the replicas after the last step of the run."""
        if self._common and self._since_average:
            self._average()

    @property
    def _since_average(self) -> int:
        """The steps since the replicas were averaged."""
        assert self._local.every is not None
        return self.step % self._local.every

    @torch.no_grad()
    def _average(self) -> None:
        replica = [p.detach() for p in self.parameters]
        changes = torch._foreach_sub(self._common, replica)
        buffers = [b for b in self._ddp.module.buffers() if b.is_floating_point()]
        for work in [dist.all_reduce(value, async_op=True) for value in [*changes, *buffers]]:
            work.wait()
        torch._foreach_div_([*changes, *buffers], self.mesh.dp_size)
        momentum, lr = self._local.outer_momentum, self._local.outer_lr
        if momentum:
            torch._foreach_mul_(self._momentum, momentum)
            torch._foreach_add_(self._momentum, changes)
            torch._foreach_add_(changes, self._momentum, alpha=momentum)
        torch._foreach_add_(self._common, changes, alpha=-lr)
        torch._foreach_copy_(replica, self._common)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the common parameters and the momentum."""
        return {
            f"{kind}.{index}": value
            for kind, values in (("common", self._common), ("momentum", self._momentum))
            for index, value in enumerate(values)
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with what `state_dict` returned."""
        if state:
            indexed = list(enumerate(self.parameters))
            kept = (
                [state[f"{kind}.{i}"].to(p.device) for i, p in indexed]
                for kind in ("common", "momentum")
            )
            self._begin(*kept)


def _average_as(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket in the format `dtype`, on any backend."""
    buffer = bucket.buffer()
    sent = buffer.div(dist.get_world_size()).to(dtype)
    future = dist.all_reduce(sent, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(
        lambda done: buffer.copy_(done.value()[0])
    )
    return averaged
