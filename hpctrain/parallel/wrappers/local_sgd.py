"""Local SGD: replicas that train by themselves and are averaged every so many steps.

steps 1 .. start_step     plain DDP: the gradients of each step are averaged
steps after it            each replica takes its own gradient
every `every` steps       change = common parameters - mean of the replicas
                          momentum = outer_momentum * momentum + change
                          common parameters -= outer_lr * (change + outer_momentum * momentum)
                          every replica continues from the common parameters

Stich, "Local SGD Converges Fast and Communicates Little" (2019); with start_step Lin et al.,
"Don't Use Large Mini-Batches, Use Local SGD" (post-local SGD, 2020); with momentum Douillard et
al., "DiLoCo" (2023). The optimizer state of each replica stays its own.
"""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.config.schema import DDPConfig, LocalSGDConfig
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.wrappers.ddp import DDPModel


class LocalSGDModel(DDPModel):
    """Replicas whose parameters, instead of their gradients, are averaged.

    The factor of the gradient stays that of DDP: this rank's sum of losses x ranks / global count.
    So the mean of the replicas' gradients is the global gradient, even where the ranks have
    different counts. Where all have the same, it is the gradient of the local mean. The factor
    needs the sums of all ranks: some bytes in each step, which the stop request needs anyway.

    `scale_gradients` clips each replica's own gradient and returns its norm. `config` has the
    buckets and the like for the steps before `local.start_step`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        precision: Precision,
        accumulate: int,
        config: DDPConfig,
        local: LocalSGDConfig,
    ) -> None:
        super().__init__(module, mesh, precision, accumulate, config)
        assert local.every is not None
        self._every_steps, self._local = local.every, local
        # What the replicas have in common; there is none as long as gradients are reduced.
        self._common: list[torch.Tensor] = []
        self._momentum: list[torch.Tensor] = []

    @property
    def replicas_differ(self) -> bool:
        """Whether the ranks have taken steps by themselves; their optimizer states differ, too."""
        return bool(self._common)

    def _reduced(self, last: bool) -> AbstractContextManager[object]:
        if self.step < self._local.start_step:
            return super()._reduced(last)
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
        if self._common and (self.step - self._local.start_step) % self._every_steps == 0:
            self._average()

    def finish(self) -> None:
        """Average the replicas after the last step of the run."""
        if self._common and (self.step - self._local.start_step) % self._every_steps:
            self._average()

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
