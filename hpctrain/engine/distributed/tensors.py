"""What a rank has of a tensor, and what dtypes are called."""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_released(tensor: torch.Tensor) -> bool:
    """Return whether a parameter only stands for a weight that `quantized.release` has freed.

    Buffers may be expanded by the model itself.
    """
    if not isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        return False
    return tensor.ndim == 2 and tensor.stride() == (0, 0) and tensor.numel() > 1


def own_region(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the part of the whole tensor that this rank has, as one slice for each dimension."""
    region = [range(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        place = mesh.get_coordinate()
        assert place is not None
        # FSDP2 divides what tensor parallel has left, and marks that by a placement of its own.
        for n in sorted(range(mesh.ndim), key=lambda n: isinstance(placements[n], _StridedShard)):
            placement = placements[n]
            if isinstance(placement, Shard | _StridedShard):
                left = region[placement.dim]
                size = -(-len(left) // mesh.size(n))
                region[placement.dim] = left[place[n] * size : (place[n] + 1) * size]
    return tuple(slice(part.start, part.stop) for part in region)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of floats as float32, or as it is if it is float64.

    Sums, exponentials and Fourier transforms lose too much in half precision.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
