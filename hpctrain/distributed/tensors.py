"""What a rank has of a tensor, and what dtypes are called."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
