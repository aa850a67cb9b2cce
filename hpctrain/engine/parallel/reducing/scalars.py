"""The few numbers of a step, such as sums, counts and flags.

On a GPU they are one float64 tensor, for which the host never waits. What the host knows goes to a
GPU through pinned memory: `torch.tensor(floats, device="cuda")` and `new_tensor` would wait until
the GPU has done everything that was queued before. On a CPU they are floats, because an operation
of torch takes as long as a hundred of Python's; they become a tensor where they are reduced.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import torch

from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.tasks.task import Sums

Number = float | torch.Tensor  # a tensor of shape ()
Numbers = list[float] | torch.Tensor  # a float64 tensor of shape (n,)


def together(numbers: Sequence[Number]) -> Numbers:
    """Return numbers that are all of one device, in float64: floats on a CPU."""
    first = numbers[0]
    if isinstance(first, float) or first.is_cpu:
        return [x if isinstance(x, float) else float(x.item()) for x in numbers]
    return torch.stack([x.detach().double() for x in cast(Sequence[torch.Tensor], numbers)])


def flat(sums: Sums) -> Numbers:
    """Return the sums and counts of a task: a sum and a count for each name."""
    return together([value for pair in sums.values() for value in pair])


def added(parts: Sequence[Numbers]) -> Numbers:
    """Return the sums of the numbers of each part, one after the other."""
    total = parts[0]
    for part in parts[1:]:
        if isinstance(total, torch.Tensor):
            total = total + cast(torch.Tensor, part)
        else:
            total = [a + b for a, b in zip(total, cast(list[float], part), strict=True)]
    return total


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers of the host as those of this device are."""
    made = torch.tensor(values, dtype=torch.float64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def tensor_of(numbers: Numbers) -> torch.Tensor:
    """Return the numbers as a tensor on their device."""
    if isinstance(numbers, torch.Tensor):
        return numbers
    return torch.tensor(numbers, dtype=torch.float64)


def joined(first: Numbers, second: Sequence[float]) -> torch.Tensor:
    """Return the numbers of `first`, followed by those of `second`; it is a new tensor."""
    if isinstance(first, torch.Tensor):
        return torch.cat([first, on_device(second, first.device)])
    return torch.tensor([*first, *second], dtype=torch.float64)


def on_host(numbers: torch.Tensor) -> Numbers:
    """Return the numbers of a CPU as floats; those of a GPU stay there."""
    return listed(numbers) if numbers.is_cpu else numbers


def listed(numbers: Numbers) -> list[float]:
    """Return the numbers as floats; waits for the device."""
    return numbers if isinstance(numbers, list) else numbers.tolist()


def over(number: float, count: Number) -> Number:
    """Return number / count, with the same bits on each device.

    A count of 0 is taken as 1, where nothing counts, which is no update.
    """
    if isinstance(count, torch.Tensor):
        return number / torch.where(count == 0, 1.0, count)  # torch: 1 / count, times number
    return 1 / (count or 1.0) * number


def reordered(pairs: Numbers, names: list[str], wanted: list[str]) -> Numbers:
    """Return two numbers for each wanted name, zeros where there are none; waits for the device."""
    values = listed(pairs)
    known = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
    found = [value for name in wanted for value in known.get(name, (0.0, 0.0))]
    return found if isinstance(pairs, list) else on_device(found, pairs.device)


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
    """The numbers of the last two steps, unless they were taken.

    host     queues step 7    queues step 8    reads the numbers of step 7    queues step 9
    GPU      ... step 6 ......... step 7 ......... step 8 ...................

    A GPU works behind the host. If the host read the numbers of a step at once, the GPU would have
    nothing to do while the host prepares the next step. So the numbers of a step are copied to
    pinned memory on the training's stream, and are read after the next step has been queued. This
    does not depend on how fast the device is, so all ranks read the numbers of the same step.

    On the CPU the numbers of a step are there when it returns, and are read at once.
    """

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


class Asks(Protocol):
    """What has numbers in the reduction, as a stop request has."""

    def flags(self) -> list[float]:
        """Return this rank's numbers, always as many."""

    def offer(self, totals: Numbers) -> None:
        """Take their sums over all ranks."""


class Exchange:
    """The one reduction of a step: the sums of the loop, and what parts let all ranks know.

    sums of the loop ──┐
    flags of each part ┴── one all-reduce ── sums, and to each part the totals of its flags

    Attributes:
        asking: What has flags, in the same order on all ranks.
    """

    def __init__(self, mesh: Mesh, asking: Sequence[Asks] = ()) -> None:
        self._mesh, self.asking = mesh, [*asking]

    def reduce(
        self,
        values: Numbers,
        join: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers,
    ) -> tuple[Numbers, torch.Tensor]:
        """Return the sums of `values` over all ranks, and what `join` has added, as a tensor.

        `join` may append more to what is reduced. The host reads the numbers of a CPU once.
        """
        flags = [each.flags() for each in self.asking]
        reduced = join(joined(values, [*chain(*flags)]))
        self._mesh.add(reduced)
        known, place = on_host(reduced), len(values)
        for each, own in zip(self.asking, flags, strict=True):
            if own:
                each.offer(known[place : place + len(own)])
                place += len(own)
        rest = reduced if place == len(known) else reduced[place:]
        return known[: len(values)], rest
