"""Data parallel: every rank has the whole model, and gradients are averaged while they appear."""

# Annotations are not postponed here, because torch looks at those of a hook.
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.schema import CompressionConfig, DDPConfig
from hpctrain.errors import ConfigError
from hpctrain.models.quantized import is_released
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.reducing.gradient_compression import compression
from hpctrain.parallel.reducing.scalars import Scalars
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.shards.types import Batch
from hpctrain.tasks import Task


class DDPModel(ParallelModel):
    """A model in torch's DistributedDataParallel (Li et al. 2020).

    `compress` is `train.compression`; None sends whole gradients. `every` reduces the gradients
    after each micro-batch instead of after the last one.
    """

    can_repeat = False

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        precision: Precision,
        accumulate: int,
        config: DDPConfig,
        *,
        compress: CompressionConfig | None = None,
        every: bool = False,
    ) -> None:
        if released := [name for name, p in module.named_parameters() if is_released(p)]:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, released)
        ddp = DistributedDataParallel(
            module,
            init_sync=False,  # `fill` has given all ranks the same values
            device_ids=[precision.device.index] if precision.device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_mb,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            find_unused_parameters=config.find_unused_parameters,
        )
        if precision.reduce != precision.params:
            ddp.register_comm_hook(precision.reduce, _average_as)
        super().__init__(ddp, mesh, precision, accumulate)
        self._ddp, self._every = ddp, every
        self._compression = None
        if compress is not None and compress.kind != "none":
            self._compression = compression(compress, module, lambda: self.step)
            ddp.register_comm_hook(self._compression, type(self._compression).reduce)

    def forward_backward(self, task: Task, batch: Batch) -> tuple[list[str], Scalars]:
        """Add the gradient of the loss per row of a share; reduce it over the ranks.

        A ConfigError says so if a parameter that is trained has no gradient, or more than one.
        """
        try:
            return super().forward_backward(task, batch)
        except RuntimeError as error:
            known = (text for start, text in _REFUSALS.items() if start in str(error))
            if (text := next(known, None)) is None:
                raise
            fixed = "parallel.ddp.static_graph=false and " if self._ddp.static_graph else ""
            raise ConfigError(text.format(fixed=fixed)) from error

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of the compression."""
        return self._compression.state_dict() if self._compression is not None else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue with what `state_dict` of the same rank returned."""
        if self._compression is not None:
            self._compression.load_state_dict(state)

    def _reduced(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or self._every else self._ddp.no_sync()


# What torch says in 900 characters, and without our keys.
_REFUSALS = {
    "Expected to have finished reduction": "parallel.ddp: parameters that are trained had no "
    "gradient in the step before, because the model did not use them, or computed them under "
    "torch.no_grad(). Use {fixed}parallel.ddp.find_unused_parameters=true, or freeze them by "
    "optimizer.groups",
    "Expected to mark a variable ready only once": "parallel.ddp: parameters had several gradients "
    "in one backward pass, as with torch.utils.checkpoint and use_reentrant=True. Use "
    "use_reentrant=False there; or, if all steps use the same parameters, "
    "parallel.ddp.static_graph=true with train.accumulate=1",
}


def _average_as(dtype: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket in the format `dtype`, on any backend."""
    buffer = bucket.buffer()
    sent = buffer.div(dist.get_world_size()).to(dtype)
    future = dist.all_reduce(sent, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(
        lambda done: buffer.copy_(done.value()[0])
    )
    return averaged
