"""Numbers of the steps that the host reads without stopping the device.

    host     queues step 7    queues step 8    reads the numbers of step 7    queues step 9
    GPU      ... step 6 ......... step 7 ......... step 8 ...................

A GPU works behind the host. If the host read the numbers of a step at once, the GPU would have
nothing to do while the host prepares the next step. So the numbers of a step are copied to pinned
memory on the training's stream, and are read after the next step has been queued. This does not
depend on how fast the device is, so all ranks read the numbers of the same step.

On the CPU the numbers of a step are there when it returns, and are read at once.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch


class _Numbers(NamedTuple):
    """The numbers of one step; `arrived` is None if they are there already."""

    values: Sequence[float] | torch.Tensor
    arrived: torch.cuda.Event | None
    about: Any

    def read(self) -> Sequence[float]:
        if not isinstance(self.values, torch.Tensor):
            return self.values
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[float] = self.values.tolist()
        return found


class Copied:
    """The numbers of the last two steps, unless they were taken."""

    def __init__(self) -> None:
        self._offered: deque[_Numbers] = deque(maxlen=2)

    def offer(self, values: Sequence[float] | torch.Tensor, about: Any = None) -> None:
        """Store n numbers, or a tensor of shape (n,), without waiting for the device."""
        arrived = None
        if isinstance(values, torch.Tensor) and not values.is_cpu:
            values, arrived = to_host(values.detach())
        self._offered.append(_Numbers(values, arrived, about))

    @property
    def on_the_way(self) -> bool:
        """Whether the host would wait for the numbers of the last step."""
        return bool(self._offered) and self._offered[-1].arrived is not None

    def take(self, *, late: bool) -> Iterable[tuple[Sequence[float], Any]]:
        """Return the numbers that were not taken yet, each with what they are `about`.

        With `late`, those of the last step are left for later if they come from a GPU.
        """
        kept = int(late and self.on_the_way)
        taken = [self._offered.popleft() for _ in range(len(self._offered) - kept)]
        return [(numbers.read(), numbers.about) for numbers in taken]

    def last(self) -> Sequence[float]:
        """Return the numbers of the last step, if they were not taken; it waits for them."""
        return self._offered[-1].read() if self._offered else []


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Copy a tensor of a GPU to pinned memory; return the copy, and what says when it is there."""
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return copy, arrived
