"""Frozen linear layers in 4 bits, by bitsandbytes: the base of QLoRA (Dettmers et al. 2023).

    weight ── blocks of 64 ── nf4 codes, two in a byte ──┐
                         └─── a scale of each, in 8 bits ┴── dequantized in forward and backward

Only layers that have an adapter are quantized, once their weights were loaded. A packed weight has
another shape than that of the file, so it is never saved: a checkpoint has the adapters, and the
base is read and quantized again, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.models.lora import adapted, class_with_adapter, plain_class


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is packed: two codes in a byte, uint8 (outputs * inputs / 2, 1).

    `quant_state` has bitsandbytes' scales, and the shape and the dtype of the weight.
    """

    quant_state: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs); the backward pass unpacks the weight again."""
        import bitsandbytes

        out: torch.Tensor = bitsandbytes.matmul_4bit(
            x, self.weight.t(), quant_state=self.quant_state, bias=self.bias
        )
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Let the scales follow the weight to another device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.quant_state.to(self.weight.device)
        return self


def quantize(model: nn.Module) -> None:
    """Pack the weights of all layers that have an adapter, in place.

    The model is whole, and its weights were loaded. A layer that computes otherwise than
    `torch.nn.Linear` is a ConfigError.
    """
    functional = _functional()
    for name, layer in adapted(model):
        if plain_class(layer).forward is not nn.Linear.forward:
            raise ConfigError(
                f"train.lora.quantize=nf4: {name} is a {plain_class(layer).__name__}, which "
                "computes otherwise than torch.nn.Linear; match other layers (train.lora.match)"
            )
        weight: Any = layer.weight
        if type(weight.data) is not torch.Tensor:
            raise ConfigError(
                f"train.lora.quantize=nf4: {name} is divided over ranks; use parallel=ddp"
            )
        packed, state = _packed(functional, weight)
        layer.__class__ = class_with_adapter(FourBitLinear)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        layer.quant_state = state


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight (outputs, inputs) with which a quantized layer computes."""
    functional = _functional()
    found: torch.Tensor = functional.dequantize_4bit(*_packed(functional, weight))
    return found.to(weight.dtype)


def _packed(functional: Any, weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
    packed, state = functional.quantize_4bit(
        weight.detach().contiguous(), quant_type="nf4", compress_statistics=True
    )
    return packed, state


def _functional() -> Any:
    try:
        from bitsandbytes import functional
    except ImportError:
        raise ConfigError(
            "train.lora.quantize=nf4 needs bitsandbytes: pip install 'hpctrain[qlora]'"
        ) from None
    return functional
