"""Ranks that skip a block take part in its communication, as FSDP2 needs it.

    rank 0   block 0   block 1   block 2       gathers 0, 1, 2   reduces 2, 1, 0
    rank 1   block 0      -      block 2       gathers 0, 1, 2   reduces 2, 1 (zeros), 0

FSDP2 gathers the parameters of a block when the block is called. Gathers have no names: if rank 1
called only blocks 0 and 2 (layer drop, a batch without images), rank 0 would get the parameters of
block 2 as those of block 1, without an error. So each rank keeps to one order of the blocks.

The ranks agree on the order in their first step, by a small reduction before each block. From then
on a rank sees by itself which blocks it skips, so later steps cost nothing. A call that does not
fit the order is refused, because no other rank would know of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from hpctrain.errors import ConfigError


@dataclass(eq=False)
class _Call:
    """One call of a block, until the backward pass has reached it.

    Attributes:
        number: The number of the block.
        reduces: Whether its gradients are reduced when the backward pass leaves it. Those of the
            first call are reduced at the end of the backward pass if its inputs need no gradient.
        by_torch: Whether torch does that, which looks at the inputs on this rank only.
    """

    number: int
    reduces: bool
    by_torch: bool


class Lockstep:
    """Lets all ranks gather and reduce the blocks of a model in one order.

    Args:
        root: The divided model.
        blocks: Its divided blocks by name.
        ranks: The ranks that have them; None means all of them.
        device: Device of this rank.
        always: Agree on the order in every step, for models whose order depends on the data.
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
        self._ranks, self._device, self._always = ranks, device, always
        # The order of each forward pass of a step, with and without gradients. It ends with the
        # number of blocks, which stands for the end of the pass.
        self._orders: dict[tuple[bool, int], list[int]] = {}
        self._known: set[bool] = set()
        self._order: list[int] | None = None
        self._done: list[int] = []
        self._passes = 0
        self._calls: list[_Call] = []
        self._open: _Call | None = None
        self._left: Counter[int] = Counter()  # the calls of each block, by its id
        for number, block in enumerate(self._blocks):
            # Hooks of torch's come after the first ones here, and before the second ones.
            block.register_forward_pre_hook(
                _eager(partial(self._before, number)), prepend=True, with_kwargs=True
            )
            block.register_forward_hook(_eager(self._after), prepend=True)
        root.register_forward_pre_hook(_eager(self._begin), prepend=True)
        root.register_forward_hook(_eager(self._end), prepend=True)

    def start(self, *, train: bool) -> None:
        """Begin a micro-batch; after the first one of its kind the orders are known."""
        if any(kind is train for kind, _ in self._orders):
            self._known.add(train)
        self._passes = 0
        self._open = None
        self._calls.clear()
        self._left.clear()

    def comes_again(self, blocks: Sequence[nn.Module]) -> bool:
        """Return whether the backward pass comes to another call of one of these blocks."""
        return any(self._left[id(block)] for block in blocks)

    def _begin(self, *_: Any) -> None:
        kind = torch.is_grad_enabled()
        self._order = None
        if kind in self._known:
            self._order = self._orders.get((kind, self._passes))
            if self._order is None:
                self._refuse("the model is called more often in a step than in the first one")
        self._done = []

    def _before(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_backward():  # a block that is computed again
            return
        by_torch = _needs_gradient((args, kwargs))
        self._wait_for(number, by_torch)
        self._count(number, by_torch)

    def _after(self, _: nn.Module, __: Any, outputs: Any) -> None:
        if not _in_backward() and torch.is_grad_enabled() and self._calls:
            self._watch(outputs, self._calls[-1])

    def _end(self, _: nn.Module, __: Any, outputs: Any) -> None:
        by_torch = _needs_gradient(outputs)
        self._wait_for(len(self._blocks), by_torch)
        self._done.append(len(self._blocks))
        if self._order is None and not self._always:
            self._learn(by_torch)
        self._passes += 1
        if torch.is_grad_enabled():
            self._watch(outputs, None)

    def _wait_for(self, number: int, by_torch: bool) -> None:
        """Take part in the blocks that other ranks call before this one."""
        if self._order is None:
            while (first := self._agreed(number)) != number:
                self._attend(first, by_torch)
        else:
            rest = self._order[len(self._done) :]
            if number not in rest:
                self._refuse(f"{self._names[number]} is called in another order than before")
            for skipped in rest[: rest.index(number)]:
                self._attend(skipped, by_torch)

    def _agreed(self, number: int) -> int:
        """Return the least of the numbers of the blocks that the ranks are about to call."""
        wanted = torch.full((1,), number, device=self._device)
        dist.all_reduce(wanted, dist.ReduceOp.MIN, group=self._ranks)
        return int(wanted)

    def _learn(self, by_torch: bool) -> None:
        """Keep the order, with the blocks that no rank has called: a later step may call them."""
        order = list(self._done)
        for number in range(len(self._blocks)):
            if number not in order:
                self._attend(number, by_torch)
                order.insert(next(i for i, other in enumerate(order) if other > number), number)
        self._orders[torch.is_grad_enabled(), self._passes] = order

    def _attend(self, number: int, by_torch: bool) -> None:
        """Gather the parameters of a block that this rank does not call."""
        block = self._blocks[number]
        state = _state(block)
        state._pre_forward(block, (), {})
        state._post_forward(block, (), None)
        self._count(number, by_torch)

    def _count(self, number: int, by_torch: bool) -> None:
        if torch.is_grad_enabled():
            # Whether a call is the first one is the same on all ranks.
            self._calls.append(_Call(number, by_torch or bool(self._done), by_torch))
            self._left[id(self._blocks[number])] += 1
        self._done.append(number)

    def _last(self) -> _Call:
        call = self._calls.pop()
        self._left[id(self._blocks[call.number])] -= 1
        return call

    def _watch(self, outputs: Any, call: _Call | None) -> None:
        """See when the backward pass reaches the outputs of a call, or those of the model."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._reached, call))

    def _reached(self, call: _Call | None, _: torch.Tensor) -> None:
        # It runs at the end of the backward pass, before what torch has registered later.
        Variable._execution_engine.queue_callback(self._leave)
        self._close(call)
        # The backward pass goes through the calls from the last to the first.
        while call in self._calls and (last := self._last()) is not call:
            self._attend_backward(last)
        if call is not None and call.reduces and not call.by_torch:
            self._open = call

    def _close(self, reached: _Call | None) -> None:
        """Reduce the gradients of the call before, where torch does not."""
        if self._open is not None and self._open is not reached:
            _state(self._blocks[self._open.number])._fsdp_param_group.post_backward()
            self._open = None

    def _leave(self) -> None:
        self._close(None)
        while self._calls:
            self._attend_backward(self._last())

    def _attend_backward(self, call: _Call) -> None:
        """Gather the parameters of a block again, and reduce gradients of zero."""
        state = _state(self._blocks[call.number])
        state._pre_backward(None)
        if call.reduces:
            state._fsdp_param_group.post_backward()

    def _refuse(self, reason: str) -> NoReturn:
        raise ConfigError(
            f"{reason}, which other ranks do not see. FSDP would mix the parameters of blocks. Use "
            "parallel.fsdp.agree=true, by which the ranks agree before each block, or ddp "
            "(parallel.dp_shard=1) with parallel.ddp.find_unused_parameters=true"
        )


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    eager: Callable[..., Any] = torch.compiler.disable(hook)
    return eager


def _state(block: nn.Module) -> Any:
    assert isinstance(block, FSDPModule)
    return block._get_fsdp_state()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _needs_gradient(values: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(values)
    )
