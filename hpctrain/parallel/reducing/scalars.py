"""The few numbers of a step, such as sums, counts and flags, where arithmetic with them is cheap.

    on a GPU     one float64 tensor: the host never waits for it
    on the CPU   Python's floats: an operation of torch takes microseconds even for one number

These functions take both, so that a step is written once. Python's floats go to a GPU through
pinned memory. `torch.tensor(floats, device="cuda")` and `new_tensor` would let the host wait until
the GPU has done everything that was queued before.
"""

from typing import TypeAlias

import torch

from hpctrain.parallel.mesh import Mesh
from hpctrain.tasks import Sums

Scalars: TypeAlias = "list[float] | torch.Tensor"
"""n numbers: a list, or a float64 tensor of shape (n,)."""

Scalar: TypeAlias = "float | torch.Tensor"
"""One of them: a float, or a tensor of shape ()."""


def flat(sums: Sums) -> Scalars:
    """Return the sums and counts of a task: a sum and a count for each name."""
    values = [value for pair in sums.values() for value in pair]
    if values[0].device.type == "cpu":
        return [float(value.item()) for value in values]
    return torch.stack([value.detach().double() for value in values])


def on_device(values: list[float], device: torch.device) -> Scalars:
    """Return the values as the others of this device are."""
    if device.type == "cpu":
        return values
    pinned = torch.tensor(values, dtype=torch.float64).pin_memory()
    return pinned.to(device, non_blocking=True)


def joined(first: Scalars, second: list[float]) -> Scalars:
    """Return the numbers of `first`, followed by those of `second`."""
    if isinstance(first, list):
        return first + second
    appended = on_device(second, first.device)
    assert isinstance(appended, torch.Tensor)
    return torch.cat([first, appended])


def added(first: Scalars, second: Scalars) -> Scalars:
    """Return the sums of equally many numbers, one by one; both are lists, or both are tensors."""
    if isinstance(first, torch.Tensor):
        assert isinstance(second, torch.Tensor)
        return first + second
    return [a + b for a, b in zip(first, second, strict=True)]


def over_ranks(values: Scalars, mesh: Mesh) -> Scalars:
    """Return the sums over all ranks; a tensor is changed in place."""
    if isinstance(values, list):
        if mesh.degrees.ranks == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        mesh.add(tensor)
        return tensor.tolist()
    mesh.add(values)
    return values


def divisor(count: Scalar) -> Scalar:
    """Return a count as the divisor of its sum: 1 where nothing counts, which is no update."""
    if isinstance(count, torch.Tensor):
        return torch.where(count == 0, 1.0, count)
    return count or 1.0


def at_most(value: Scalar, most: float) -> Scalar:
    """Return the smaller one; NaN stays NaN."""
    return value.clamp(max=most) if isinstance(value, torch.Tensor) else min(value, most)


def reordered(pairs: Scalars, names: list[str], wanted: list[str]) -> Scalars:
    """Return two numbers for each wanted name, zeros where there are none; waits for the device."""
    values = pairs if isinstance(pairs, list) else pairs.tolist()
    known = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
    found = [value for name in wanted for value in known.get(name, (0.0, 0.0))]
    return found if isinstance(pairs, list) else on_device(found, pairs.device)
