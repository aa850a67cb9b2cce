"""Matrix products in 8 bits, by torchao."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.parallel.preparing.blocks import find_blocks


def compute_in_float8(model: nn.Module, names: Collection[str]) -> None:
    """Replace the linear layers that can compute in float8, in place; weights stay as they are.

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
