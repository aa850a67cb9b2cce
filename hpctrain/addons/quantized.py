"""Frozen linear layers in 4 bits, by bitsandbytes: the base of QLoRA (Dettmers et al. 2023).

    weight ── blocks of 64 ── nf4 codes, two in a byte ──┐
                         └─── a scale of each, in 8 bits ┴── dequantized in forward and backward

Only layers that have an adapter are quantized. Their weights are read and packed one after the
other, so a device never holds more than the packed ones and one that is not packed yet:

    release ── no memory for them ── the initial values of the others ── pack, while one is read

A packed weight has another shape than that of the file, so it is never saved: a checkpoint has the
adapters, and the base is read and quantized again, which gives the same bits.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.engine.layers.lora import adapted, class_with_adapter, plain_class
from hpctrain.engine.layers.ties import ties


class FourBitLinear(nn.Linear):
    """A linear layer whose weight is packed: two codes in a byte, uint8 (outputs * inputs / 2, 1).

    `quant_state` has bitsandbytes' scales, and the shape and the dtype of the weight.
    """

    quant_state: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs); the backward pass unpacks the weight again."""
        import bitsandbytes

        bias: torch.Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):  # bitsandbytes computes in the format of x
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = bias if bias is None else bias.to(x.dtype)
        self.quant_state.dtype = x.dtype  # of the unpacked weight
        out: torch.Tensor = bitsandbytes.matmul_4bit(
            x, self.weight.t(), quant_state=self.quant_state, bias=bias
        )
        return out

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Let the scales follow the weight to another device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.quant_state.to(self.weight.device)
        return self


def packed_bytes(elements: int) -> int:
    """Return the bytes of a weight of so many elements: codes, scales, and scales of these."""
    blocks = -(-elements // 64)
    return -(-elements // 2) + blocks + 4 * -(-blocks // 256)


def release(model: nn.Module, device: torch.device) -> None:
    """Free the weights that `pack` will replace: those of layers with an adapter, in place.

    One element on the device then stands for all of a weight. Weights that are trained, or that
    other modules share, stay until `quantize`.
    """
    kept = {name for first, others in ties(model) for name in (first, *others)}
    for name, layer in adapted(model):
        weight: Any = layer.weight
        if not weight.requires_grad and f"{name}.weight" not in kept:
            one = torch.zeros((), dtype=weight.dtype, device=device)
            layer.weight = nn.Parameter(one.expand(weight.shape), requires_grad=False)


def quantize(model: nn.Module) -> None:
    """Pack the loaded weights of all layers with an adapter that are not packed yet, in place."""
    for name, layer in adapted(model):
        if not isinstance(layer, FourBitLinear):
            pack(name, layer, layer.weight)


def pack(name: str, layer: Any, weight: Any) -> None:
    """Let a layer with an adapter compute with this weight, (outputs, inputs), in 4 bits.

    A layer that computes otherwise than `torch.nn.Linear` is a ConfigError with its name.
    """
    if plain_class(layer).forward is not nn.Linear.forward:
        raise ConfigError(
            f"train.lora.quantize=nf4: {name} is a {plain_class(layer).__name__}, which computes "
            "otherwise than torch.nn.Linear; match other layers (train.lora.match)"
        )
    packed, state = _packed(_functional(), weight)
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
