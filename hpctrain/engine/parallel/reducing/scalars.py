"""The few numbers of a step, such as sums, counts and flags.

On a GPU they are one float64 tensor, for which the host never waits. What the host knows goes to a
GPU through pinned memory: `torch.tensor(floats, device="cuda")` and `new_tensor` would wait until
the GPU has done everything that was queued before. On a CPU they are floats, because an operation
of torch takes as long as a hundred of Python's; they become a tensor where they are reduced.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import torch

from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.tasks.task import Sums

Number = float | torch.Tensor  # a tensor of shape ()
Numbers = list[float] | torch.Tensor  # a float64 tensor of shape (n,)
_LEAST = 64  # numbers that a piece of page-locked memory has room for


def is_late(numbers: object) -> TypeGuard[torch.Tensor]:
    """Return whether the host would wait for numbers: whether they are a tensor of a GPU."""
    return isinstance(numbers, torch.Tensor) and not numbers.is_cpu


def flat(sums: Sums) -> Numbers:
    """Return the sums and counts of a task in float64: a sum and a count for each name."""
    values = [value for pair in sums.values() for value in pair]
    if is_late(values[0]):
        return torch.stack([value.detach().double() for value in values])
    return [float(value.item()) for value in values]


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


def on_host(numbers: torch.Tensor) -> Numbers:
    """Return the numbers of a CPU as floats; those of a GPU stay there."""
    return numbers if is_late(numbers) else listed(numbers)


def listed(numbers: Numbers) -> list[float]:
    """Return the numbers as floats; waits for the device."""
    return numbers if isinstance(numbers, list) else numbers.tolist()


def over(number: float, count: Number) -> Number:
    """Return number / count, with the same bits on each device.

    A count of 0 is taken as 1. On a GPU the factor is then infinite, and the step is undone or its
    parameters are dropped (`engine.faults.health`).
    """
    if isinstance(count, torch.Tensor):
        return number / count  # torch: 1 / count, times number
    return 1 / (count or 1.0) * number


def reordered(pairs: Numbers, names: list[str], wanted: list[str]) -> Numbers:
    """Return two numbers for each wanted name, zeros where there are none; waits for the device."""
    values = listed(pairs)
    known = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
    found = [value for name in wanted for value in known.get(name, (0.0, 0.0))]
    return found if isinstance(pairs, list) else on_device(found, pairs.device)


class _Memory(NamedTuple):
    """Page-locked memory of the host, and the event that says when the numbers are there."""

    numbers: torch.Tensor
    arrived: torch.cuda.Event


def to_host(values: torch.Tensor, memory: _Memory | None) -> _Memory:
    """Copy a tensor (n,) of a GPU to the host without waiting: into `memory` if it is enough."""
    if memory is None or len(memory.numbers) < len(values):
        room = torch.empty(max(_LEAST, len(values)), dtype=values.dtype, pin_memory=True)
        memory = _Memory(room, torch.cuda.Event())
    memory.numbers[: len(values)].copy_(values, non_blocking=True)
    memory.arrived.record()
    return memory


class _Copy:
    """Numbers of a GPU that go to the host in one copy, with `send`, and are read once."""

    def __init__(self) -> None:
        self.parts, self.size = list[torch.Tensor](), 0
        self.memory: _Memory | None = None  # once it has begun
        self._values: list[float] | None = None  # once they were read

    def add(self, parts: Iterable[torch.Tensor]) -> slice:
        self.parts += [part.detach().reshape(-1).double() for part in parts]
        first, self.size = self.size, sum(map(len, self.parts))
        return slice(first, self.size)

    def read(self) -> list[float]:
        if self._values is None:
            if self.memory is None:
                send()
            assert self.memory is not None
            self.memory.arrived.synchronize()
            self._values = self.memory.numbers[: self.size].tolist()
            _free.append(self.memory)
        return self._values


_waiting, _free = _Copy(), list[_Memory]()


def send() -> None:
    """Begin to copy what was offered since the last call: once in a step, after its last number.

    All of it takes one kernel, one copy and one event. Memory that was read is used again.
    """
    global _waiting
    if _waiting.parts:
        copy, _waiting = _waiting, _Copy()
        copy.memory = to_host(torch.cat(copy.parts), _free.pop() if _free else None)
        copy.parts = []


class _Numbers(NamedTuple):
    """The numbers of one step: there already, or the part `place` of a copy."""

    values: Sequence[float] | _Copy
    about: Any
    place: slice = slice(None)

    def read(self) -> Sequence[float]:
        values = self.values.read() if isinstance(self.values, _Copy) else self.values
        return values[self.place]


class Copied:
    """The numbers of the last two steps, unless they were taken.

    host     queues step 7    queues step 8    reads the numbers of step 7    queues step 9
    GPU      ... step 6 ......... step 7 ......... step 8 ...................

    A GPU works behind the host. If the host read the numbers of a step at once, the GPU would have
    nothing to do while the host prepares the next step. So the numbers of a step are copied to
    page-locked memory on the training's stream (`send`), and are read after the next step has been
    queued. This does not depend on how fast the device is, so all ranks read the numbers of the
    same step.

    On the CPU the numbers of a step are there when it returns, and are read at once.
    """

    def __init__(self) -> None:
        self._offered: deque[_Numbers] = deque(maxlen=2)

    def offer(self, numbers: Sequence[Number] | torch.Tensor, about: Any = None) -> None:
        """Store n numbers, or a tensor of shape (n,), without waiting for the device.

        They must not be changed in place before `send`.
        """
        parts = [numbers] if isinstance(numbers, torch.Tensor) else numbers
        if is_late(parts[0]):
            place = _waiting.add(cast(Sequence[torch.Tensor], parts))
            self._offered.append(_Numbers(_waiting, about, place))
        else:
            self._offered.append(_Numbers([*map(float, numbers)], about))

    def take(self, *, late: bool) -> Iterable[tuple[Sequence[float], Any]]:
        """Return the numbers that were not taken yet, each with what they are `about`.

        With `late`, those of the last step are left for later if they come from a GPU.
        """
        kept = late and bool(self._offered) and isinstance(self._offered[-1].values, _Copy)
        taken = [self._offered.popleft() for _ in range(len(self._offered) - kept)]
        return [(numbers.read(), numbers.about) for numbers in taken]

    def last(self) -> Sequence[float]:
        """Return the numbers of the last step, if they were not taken; it waits for them."""
        return self._offered[-1].read() if self._offered else []


class _Asks(Protocol):
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

    def __init__(self, mesh: Mesh, asking: Sequence[_Asks] = ()) -> None:
        global _waiting
        _waiting = _Copy()  # a step of another training may have failed before it sent its numbers
        self._mesh, self.asking = mesh, [*asking]
        self._told: tuple[list[float], torch.Tensor] | None = None  # the flags that a GPU has

    def reduce(
        self,
        values: Numbers,
        join: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers,
    ) -> tuple[Numbers, torch.Tensor]:
        """Return the sums of `values` over all ranks, and what `join` has added, as a tensor.

        `join` may append more to what is reduced. The host reads the numbers of a CPU once.
        """
        flags = [each.flags() for each in self.asking]
        reduced = join(self._joined(values, [*chain(*flags)]))
        self._mesh.add(reduced)
        known, place = on_host(reduced), len(values)
        for each, own in zip(self.asking, flags, strict=True):
            if own:
                each.offer(known[place : place + len(own)])
                place += len(own)
        rest = reduced if place == len(known) else reduced[place:]
        return known[: len(values)], rest

    def ask(self, one: _Asks) -> None:
        """Let all ranks know the flags of one alone, between two steps."""
        flags = on_device(one.flags(), self._mesh.device)
        self._mesh.add(flags)
        one.offer(flags)
        send()

    def _joined(self, values: Numbers, flags: list[float]) -> torch.Tensor:
        """Return the values, followed by the flags; it is a new tensor."""
        if not isinstance(values, torch.Tensor):
            return torch.tensor([*values, *flags], dtype=torch.float64)
        if self._told is None or self._told[0] != flags:  # few steps have others than the last one
            self._told = flags, on_device(flags, values.device)
        return torch.cat([values, self._told[1]])
