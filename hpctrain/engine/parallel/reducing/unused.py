"""Parameters that only some ranks use, such as heads of other tasks, under FSDP2.

    rank 0 uses head A   gradient of A, zeros for B ──┐ one reduction      A, B: as one process
    rank 1 uses head B   zeros for A, gradient of B ──┘
    no rank uses C       zeros, which are removed                          C: as one process, None

FSDP2 reduces the parameters that have a gradient on this rank. If ranks use others, it adds what
does not belong together. So a parameter without a gradient gets zeros. Which ones no rank has used
is known from the reduction of the step's sums: their gradient is None again, for an optimizer
changes a parameter whose gradient is zero (by weight decay, for example).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hpctrain.engine.parallel import second_gradients
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.reducing.lockstep import Lockstep
from hpctrain.engine.parallel.reducing.scalars import Numbers, listed


class Unused:
    """Gives parameters that this rank does not use a gradient of zero.

    `undivided` are the parameters that every rank has whole, and `ranks` those over which their
    gradients are averaged. `lockstep` knows which blocks the backward pass comes to again. The step
    is told which of the `parameters` were used.
    """

    def __init__(
        self,
        model: nn.Module,
        undivided: Sequence[nn.Parameter],
        ranks: DeviceMesh,
        lockstep: Lockstep | None = None,
        parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        self._undivided, self._ranks, self._lockstep = undivided, ranks, lockstep
        self._parameters, self._own = parameters, list[float]()
        self._used: set[int] = set()
        self._twice = False  # whether a gradient was differentiated again
        for module in model.modules():
            if isinstance(module, FSDPModule):
                group: Any = module._get_fsdp_state()._fsdp_param_group
                if group is not None:
                    group.post_backward = partial(self._post_backward, group, group.post_backward)

    def average(self) -> None:
        """Average the gradients of the undivided parameters over the ranks."""
        for parameter in self._undivided:
            if parameter.grad is None:
                self._used.discard(id(parameter))
                parameter.grad = torch.zeros_like(parameter)
            else:
                self._used.add(id(parameter))
            for dim in range(self._ranks.ndim):
                dist.all_reduce(parameter.grad, group=self._ranks.get_group(dim))
            parameter.grad /= self._ranks.size()

    def flags(self) -> list[float]:
        """Return which of the `parameters` this rank has used in this step."""
        own = self._flags()
        self._used.clear()
        return own

    def _flags(self) -> list[float]:
        self._own = [float(id(parameter) in self._used) for parameter in self._parameters]
        return self._own

    def offer(self, total: Numbers) -> None:
        """Remove the gradients of parameters that no rank has used, by the sums of the flags."""
        if not all(self._own):  # otherwise the device need not be waited for
            for parameter, used in zip(self._parameters, listed(total), strict=True):
                if not used:
                    parameter.grad = None

    def settle(self, parameters: Sequence[nn.Parameter], mesh: Mesh) -> None:
        """Remove those of the gradients that no rank has used; all ranks call this together."""
        self._parameters = parameters
        total = torch.tensor(self._flags(), device=mesh.device)
        mesh.add(total)
        self.offer(total)

    def _post_backward(self, group: Any, reduce: Callable[[], None], *_: Any) -> None:
        if second_gradients.is_first():
            # The second pass needs the parameters, and only it computes their gradients.
            self._twice = True
            if group.is_unsharded:
                group.post_forward_mesh_info = None  # from now on, they are kept after forward
            return
        if group._training_state == TrainingState.FORWARD:
            return  # a gradient within the forward function: the rest of it needs the parameters
        if not all(hasattr(part, "_unsharded_param") for part in group.fsdp_params):
            return  # a part that was never gathered makes torch fail
        before = group.reduce_grads, group.reshard_after_backward
        if self._lockstep is not None and self._lockstep.comes_again(group.modules):
            # The gradient of a block that is called twice is complete after its first call. Some
            # ranks may have a part of it before, from other micro-batches.
            group.reduce_grads = False
            group.reshard_after_backward &= not self._twice
        for part in group.fsdp_params:
            whole = part.unsharded_param
            if part.sharded_param.grad is None:
                self._used.discard(id(part.sharded_param))  # it was used before the last update
            if whole.grad is not None or part.unsharded_accumulated_grad is not None:
                self._used.add(id(part.sharded_param))
            elif group.reduce_grads and whole.requires_grad:
                whole.grad = torch.zeros_like(whole)
        reduce()
        group.reduce_grads, group.reshard_after_backward = before
