"""Numbers of a step that the host reads when they are there, so that no step waits for them.

on a GPU     copied to pinned memory on the training's stream; an event says when they are there
on the CPU   kept as they are
"""

from __future__ import annotations

import torch


class Copied:
    """The numbers that were offered last."""

    def __init__(self) -> None:
        self._values: list[float] | torch.Tensor = []
        self._arrived: torch.cuda.Event | None = None

    def offer(self, values: list[float] | torch.Tensor) -> None:
        """Store the numbers without waiting for the device; always equally many of them.

        Args:
            values: n numbers: a list, or a tensor of shape (n,).
        """
        if isinstance(values, torch.Tensor) and values.device.type == "cuda":
            if self._arrived is None:
                self._values = torch.zeros(len(values), dtype=values.dtype, pin_memory=True)
                self._arrived = torch.cuda.Event()
            assert isinstance(self._values, torch.Tensor)
            self._values.copy_(values.detach(), non_blocking=True)
            self._arrived.record()
        else:
            self._values = values

    def read(self) -> list[float]:
        """Return the numbers; empty before the first `offer`. It waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values if isinstance(self._values, list) else self._values.tolist()
