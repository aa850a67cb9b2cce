"""Rows in another order, such as tokens sorted by expert, whose gradients add in a fixed order."""

from typing import Any

import torch


def inverted(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 (rows,)."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def permuted(
    x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int = 1
) -> torch.Tensor:
    """Return the permutation `order` of the rows of `x`, each of which occurs `copies` times."""
    found: torch.Tensor = _Permute.apply(x, order, inverse, copies)  # type: ignore[no-untyped-call]
    return found


class _Permute(torch.autograd.Function):
    """Indexing, whose gradient adds rows in a fixed order, on a GPU too."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = gradient[inverse]
        summed = rows if ctx.copies == 1 else rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return summed, None, None, None
