"""The few numbers of a step, such as sums, counts and flags: one float64 tensor on the device.

The host never waits for it. What the host knows goes to a GPU through pinned memory:
`torch.tensor(floats, device="cuda")` and `new_tensor` would wait until the GPU has done everything
that was queued before.
"""

from collections.abc import Sequence

import torch

from hpctrain.engine.tasks.task import Sums


def flat(sums: Sums) -> torch.Tensor:
    """Return the sums and counts of a task: a sum and a count for each name."""
    values = [value for pair in sums.values() for value in pair]
    return torch.stack([value.detach().double() for value in values])


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return numbers of the host as those of this device are."""
    made = torch.tensor(values, dtype=torch.float64)
    return made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)


def joined(first: torch.Tensor, second: Sequence[float]) -> torch.Tensor:
    """Return the numbers of `first`, followed by those of `second`; it is a new tensor."""
    return torch.cat([first, on_device(second, first.device)])


def divisor(count: torch.Tensor) -> torch.Tensor:
    """Return a count as the divisor of its sum: 1 where nothing counts, which is no update."""
    return torch.where(count == 0, 1.0, count)


def reordered(pairs: torch.Tensor, names: list[str], wanted: list[str]) -> torch.Tensor:
    """Return two numbers for each wanted name, zeros where there are none; waits for the device."""
    values = pairs.tolist()
    known = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
    found = [value for name in wanted for value in known.get(name, (0.0, 0.0))]
    return on_device(found, pairs.device)
