"""Ranks that skip a block take part in its communication, as FSDP2 needs it.

    rank 0   block 0   block 1   block 2       gathers 0, 1, 2   reduces 2, 1, 0
    rank 1   block 0      -      block 2       gathers 0, 1, 2   reduces 2, 1 (zeros), 0

FSDP2 gathers the parameters of a block when the block is called. Gathers have no names: if rank 1
called only blocks 0 and 2 (layer drop, a batch without images), rank 0 would get the parameters of
block 2 as those of block 1, without an error. So each rank keeps to one order of the blocks.

The ranks agree on the order in their first step, by a small reduction before each block. From then
on a rank sees by itself which blocks it skips, so later steps cost nothing. A call that does not
fit the order is refused, because no other rank would know of it.

The backward pass goes through the calls from the last to the first: autograd computes what was made
later before what was made earlier. So when it reaches the outputs of a call, the gradients of all
later calls are complete. FSDP2 itself reduces them where the inputs of a block need a gradient. If
they need none (the blocks before it are frozen, or this rank has skipped them), they are reduced
here, at the same place in the order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hpctrain.base.errors import ConfigError
from hpctrain.engine.parallel import second_gradients
from hpctrain.engine.parallel.second_gradients import collect_grad_tensors, replace_grad_tensors


class Lockstep:
    """Lets all ranks gather and reduce the blocks of a model in one order.

    `ranks` are those that have the divided blocks; None means all of them. With `always` they agree
    on the order in every step, for models whose order depends on the data.

    Attributes:
        learns_always: Whether a step may have more passes than those before. A loop of the user's
            may, in which all ranks make the same passes.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Mapping[str, nn.Module],
        ranks: dist.ProcessGroup | None,
        device: torch.device,
        *,
        always: bool,
    ) -> None:
        self._names, self._blocks = list(blocks), list(blocks.values())
        self._states = [_state(block) for block in self._blocks]
        self._ranks, self._device, self._always = ranks, device, always
        self.learns_always = False
        # The order of each forward pass of a step, with and without gradients. It ends with the
        # number of blocks, which stands for the end of the pass.
        self._orders: dict[tuple[bool, int], list[int]] = {}
        self._known: set[bool] = set()
        self._order: list[int] | None = None
        self._trains = False  # whether the pass has gradients
        self._done: list[int] = []
        self._passes = 0
        # The blocks that the backward pass comes to on some rank, and whether a rank has skipped a
        # block while the ranks agreed. If so, the backward pass is taken to come to every block.
        self._trained: set[int] = set()
        self._skips = False
        self._has_gradient = False  # what this rank's last call has returned
        # The numbers of the called blocks that the backward pass has not reached yet; a call is
        # known by its place in this list. The last one that it has reached, which may be open.
        self._calls: list[int] = []
        self._open: tuple[int, int] | None = None
        for number, block in enumerate(self._blocks):
            # Hooks of torch's come after the first ones here, and before the second ones.
            self._hook(block, partial(self._before, number), partial(self._after, number))
        self._hook(root, self._begin, self._end)

    @staticmethod
    def _hook(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call two functions around each call of a module, which the compiler does not see."""
        before, after = torch.compiler.disable(before), torch.compiler.disable(after)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, prepend=True)

    def start(self, *, train: bool) -> None:
        """Begin a micro-batch; after the first one of its kind the orders are known."""
        if any(kind is train for kind, _ in self._orders):
            self._known.add(train)
        self._passes = 0
        self._open = None
        self._calls.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forget at the end what the passes within this context have taught about the order."""
        known = dict(self._orders), set(self._known), set(self._trained), self._skips
        try:
            yield
        finally:
            self._orders, self._known, self._trained, self._skips = known

    def comes_again(self, blocks: Sequence[nn.Module]) -> bool:
        """Return whether the backward pass comes to another call of one of these blocks."""
        return any(self._blocks[number] in blocks for number in self._calls)

    def _begin(self, *_: Any) -> None:
        kind = torch.is_grad_enabled()
        self._order = None
        if kind in self._known:
            self._order = self._orders.get((kind, self._passes))
            if self._order is None and not self.learns_always:
                self._refuse("the model is called more often in a step than in the first one")
        self._trains, self._has_gradient, self._done = kind, False, []

    def _before(self, number: int, *_: Any) -> None:
        if second_gradients.in_backward():  # a block that is computed again
            return
        self._wait_for(number)
        self._count(number)

    def _after(self, number: int, _: nn.Module, __: Any, outputs: Any) -> Any:
        if second_gradients.in_backward() or not self._trains:
            return outputs
        outputs = _without_views(outputs)
        tensors = collect_grad_tensors(outputs)
        self._has_gradient = bool(tensors)
        for tensor in tensors:
            self._trained.add(number)
            tensor.register_hook(partial(self._reached, len(self._calls) - 1, True))
        return outputs

    def _end(self, _: nn.Module, __: Any, outputs: Any) -> None:
        self._wait_for(len(self._blocks))
        self._done.append(len(self._blocks))
        if self._order is None and not self._always:
            self._learn()
        self._passes += 1
        for tensor in collect_grad_tensors(outputs) if self._trains else ():
            tensor.register_hook(partial(self._reached, len(self._calls) - 1, False))

    def _wait_for(self, number: int) -> None:
        """Take part in the blocks that other ranks call before this one."""
        if self._order is None:
            while (first := self._agreed(number)) != number:
                self._skips = True
                self._attend(first)
        else:
            rest = self._order[len(self._done) :]
            if number not in rest:
                self._refuse(f"{self._names[number]} is called in another order than before")
            for skipped in rest[: rest.index(number)]:
                self._attend(skipped)

    def _agreed(self, number: int) -> int:
        """Return the least number of the blocks that ranks are about to call."""
        told = torch.tensor([number, -self._has_gradient, -self._skips], device=self._device)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self._ranks)
        first, has_gradient, skips = told.tolist()
        self._skips = bool(skips)
        if has_gradient:
            self._trained.add(self._done[-1])
        return int(first)

    def _learn(self) -> None:
        """Keep the order, with the blocks that no rank has called: a later step may call them."""
        order = list(self._done)
        for number in range(len(self._blocks)):
            if number not in order:
                self._skips = True
                self._attend(number)
                order.insert(next(i for i, other in enumerate(order) if other > number), number)
        self._orders[self._trains, self._passes] = order

    def _attend(self, number: int) -> None:
        """Gather the parameters of a block that this rank does not call."""
        block, state = self._blocks[number], self._states[number]
        state._pre_forward(block, (), {})
        state._post_forward(block, (), None)
        self._count(number)

    def _count(self, number: int) -> None:
        self._has_gradient = False
        if self._trains:
            self._calls.append(number)
        self._done.append(number)

    def _reached(self, place: int, opens: bool, _: torch.Tensor) -> None:
        """Note that the backward pass reaches the outputs of a call, or those of the model."""
        if second_gradients.is_first():
            if self._skips:
                raise ConfigError(
                    "the model computes a gradient that is differentiated again "
                    "(create_graph=True), and its ranks skip blocks: FSDP cannot have both. Use "
                    "ddp (parallel.dp_shard=1) with parallel.ddp.find_unused_parameters=true"
                )
            return
        # It runs at the end of the backward pass, before what torch has registered later.
        Variable._execution_engine.queue_callback(partial(self._leave, -1))
        self._leave(place)
        if opens and place == len(self._calls) - 1:
            self._open = place, self._calls.pop()

    def _leave(self, place: int) -> None:
        """Reduce the gradients of the calls after `place`, also of those that others have made."""
        if self._open is not None and self._open[0] > place:
            state, self._open = self._states[self._open[1]], None
            if state._fsdp_param_group._training_state == TrainingState.PRE_BACKWARD:
                state._fsdp_param_group.post_backward()
        while len(self._calls) > place + 1:
            number = self._calls.pop()
            if self._skips or number in self._trained:
                state = self._states[number]
                state._pre_backward(None)
                state._fsdp_param_group.post_backward()

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(
            f"{reason}, which other ranks do not see. FSDP would mix the parameters of blocks. Use "
            "parallel.fsdp.agree=true, by which the ranks agree before each block, or ddp "
            "(parallel.dp_shard=1) with parallel.ddp.find_unused_parameters=true"
        )


def _without_views(outputs: Any) -> Any:
    """Return outputs whose hooks stay if they are changed in place, which a view would lose."""
    tensors = collect_grad_tensors(outputs)
    if all(tensor._base is None for tensor in tensors):
        return outputs
    owned = (tensor.clone() if tensor._base is not None else tensor for tensor in tensors)
    return replace_grad_tensors(outputs, owned)


def _state(block: nn.Module) -> Any:
    assert isinstance(block, FSDPModule)
    return block._get_fsdp_state()
