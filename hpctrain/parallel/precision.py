"""The number formats of a run: what computes, what is stored, what is sent.

Reduced precision follows Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpctrain.config.schema import PrecisionConfig
from hpctrain.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_FIRST_SCALE = 65536.0
_GROWTH_STEPS = 2000  # steps without an overflow after which the scale is doubled
_LEAST_SCALE = 2.0**-14  # the smallest normal number of fp16: 30 overflows in a row lead to it


class Precision:
    """The formats of a run, and the scale of its loss.

    In fp16 small gradients would become 0, so the loss is multiplied by `scale`, and the gradient
    is divided by it. The scale is halved, and the step is left out, when the gradient overflows.
    The norm that shows it is global, so all ranks decide alike. A gradient that still overflows at
    the least scale is not finite by itself: `exhausted` says so, and `hpctrain.faults.health`
    decides. `scale` is 1.0 except in fp16. Raises a ConfigError if the device does not have the
    format.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.compute, self.device = config.compute, device
        self.params = DTYPES[config.params]
        self.reduce = DTYPES[config.reduce or config.params]
        self.scale = _FIRST_SCALE if self.compute == "fp16" else 1.0
        self._good_steps = 0
        if self.compute in ("tf32", "fp8"):
            _check_gpu(self.compute, device)
        if device.type == "cuda":
            tf32 = self.compute == "tf32"
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            # Convolutions have a switch of their own, which torch leaves on.
            torch.backends.cudnn.allow_tf32 = tf32

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of autocast; None when it is off."""
        if self.compute in ("bf16", "fp8"):
            return torch.bfloat16
        return torch.float16 if self.compute == "fp16" else None

    def forward(self) -> AbstractContextManager[object]:
        """Return a new context for one forward pass."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def accepts(self, loss: float | torch.Tensor, norm: float | torch.Tensor) -> bool:
        """Return whether the step may be made, and adapt the scale; waits for the device in fp16.

        If the loss, the sum over all ranks, is not finite, the scale is not the cause and does not
        change. The norm is that of the global gradient.
        """
        if self.compute != "fp16":
            return True
        if not math.isfinite(loss):
            return False
        if not math.isfinite(norm):
            self.scale, self._good_steps = max(self.scale / 2, _LEAST_SCALE), 0
            return False
        self._good_steps += 1
        if self._good_steps == _GROWTH_STEPS:
            self.scale, self._good_steps = self.scale * 2, 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot be lowered any more, so that an overflow has another cause."""
        return self.compute != "fp16" or self.scale == _LEAST_SCALE

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the steps since it changed, as JSON."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the scale that `state_dict` returned, unless the format is another."""
        if self.compute == "fp16" and state["scale"] != 1.0:
            self.scale, self._good_steps = state["scale"], state["good_steps"]


def _check_gpu(compute: str, device: torch.device) -> None:
    needed = {"tf32": (8, 0), "fp8": (8, 9)}[compute]
    text = f"it needs a GPU of compute capability {needed[0]}.{needed[1]} or newer"
    if device.type != "cuda":
        raise ConfigError(f"precision.compute={compute}: {text}, but this rank's device is a CPU")
    has = torch.cuda.get_device_capability(device)
    if has < needed:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"precision.compute={compute}: {text}; {name} has {has[0]}.{has[1]}")
