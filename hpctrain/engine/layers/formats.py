"""Number formats that models compute in by themselves."""

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of floats as float32, or as it is if it is float64.

    Sums, exponentials and Fourier transforms lose too much in half precision.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
