"""The number formats of a run: what computes, what is stored, what is sent.

Reduced precision follows Micikevicius et al., "Mixed Precision Training" (2018).
"""

import math
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import PrecisionConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.layers.gpu_support import lack
from hpctrain.engine.parallel.reducing.scalars import Number

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_FIRST_SCALE = 65536.0
_GROWTH_STEPS = 2000  # steps without an overflow after which the scale is doubled
_LEAST_SCALE = 2.0**-14  # the smallest normal number of fp16: 30 overflows in a row lead to it


@contextmanager
def default_dtype(config: PrecisionConfig) -> Iterator[None]:
    """Let torch's default dtype be float64 within a run that computes in it.

    So what models, tasks and transforms make themselves (constants, buffers, random numbers) has
    this format, too.
    """
    before = torch.get_default_dtype()
    if config.compute == "fp64":
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def wide_batch(batch: Batch) -> Batch:
    """Return a batch whose floating-point fields are float64 if torch's default dtype is."""
    if torch.get_default_dtype() != torch.float64:
        return batch
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


class Precision:
    """The formats of a run, and the scale of its loss.

    In fp16 small gradients would become 0, so the loss is multiplied by `scale`, and the gradient
    is divided by it. The scale is halved, and the step is left out, when the gradient overflows.
    The norm that shows it is global, so all ranks decide alike. A gradient that still overflows at
    the least scale is not finite by itself: `exhausted` says so, and `engine.faults.health`
    decides. `scale` is 1.0 except in fp16. Raises a ConfigError if the device does not have the
    format.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.compute, self.device = config.compute, device
        self.params = DTYPES[config.params]
        self.reduce = DTYPES[config.reduce or config.params]
        self.scale = _FIRST_SCALE if self.compute == "fp16" else 1.0
        self._good_steps = 0
        if self.compute in ("tf32", "fp8") and (needed := lack(self.compute, device)):
            raise ConfigError(f"precision.compute={self.compute}: it needs {needed}")
        if device.type == "cuda":
            _switch_tf32(self.compute == "tf32")

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

    def accepts(self, loss: Number, norm: Number, count: Number) -> bool:
        """Return whether the step may be made, and adapt the scale; waits for the device in fp16.

        `loss` and `count` are sums over all ranks, and the norm is that of the global gradient. If
        the loss is not finite or nothing counts, the scale is not the cause and does not change.
        """
        return self.compute != "fp16" or self._fits(loss, norm, count)

    def _fits(self, loss: Number, norm: Number, count: Number) -> bool:
        if not math.isfinite(loss) or not count:
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


def _switch_tf32(on: bool) -> None:
    if on and torch.version.hip:
        os.environ.setdefault("HIPBLASLT_ALLOW_TF32", "1")  # else some torchs use fp32
    torch.set_float32_matmul_precision("high" if on else "highest")
    # Convolutions have a switch of their own, which torch leaves on.
    torch.backends.cudnn.allow_tf32 = on


def compute_in_float8(model: nn.Module, names: Collection[str]) -> None:
    """Let linear layers compute in float8, by torchao, in place; weights stay as they are.

    The number of rows that a layer gets may be any: the backward pass pads them with zeros.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError(
            "precision.compute=fp8 needs torchao: pip install 'hpctrain[fp8]'"
        ) from None

    # The gradient of a weight is a sum over rows, which the GPU wants in multiples of 16.
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def float8_layers(model: nn.Module, classes: list[str]) -> list[str]:
    """Return the names of the linear layers that compute in float8: those within the blocks.

    What is outside of the blocks, the output head above all, stays in bfloat16, because its errors
    go into the loss directly (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). Of a
    model without such blocks, all linear layers but the last one are taken. Layers whose sizes are
    not multiples of 16 stay in bfloat16 too, as the GPU's instruction requires.
    """
    from hpctrain.engine.parallel.preparing.blocks import find_blocks

    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    blocks: list[str] = []
    try:
        blocks = [name for name, _ in find_blocks(model, classes)]
    except ConfigError:
        if classes:
            raise
    inside = [name for name in linear if any(name.startswith(f"{block}.") for block in blocks)]
    names = inside or list(linear)[:-1]
    fitting = [n for n in names if not (linear[n].in_features % 16 or linear[n].out_features % 16)]
    if not fitting:
        raise ConfigError(
            f"precision.compute=fp8: {type(model).__name__} has no linear layer that can compute "
            f"in it: {len(linear)} in all, {len(names)} of them besides the output head, and none "
            "of these with sizes that are multiples of 16; use precision.compute=bf16"
        )
    return fitting
