"""Matrix products in 8 bits, by torchao."""

from __future__ import annotations

from torch import nn

from hpctrain.errors import ConfigError


def compute_in_float8(model: nn.Module) -> None:
    """Replace the linear layers that can compute in float8, in place; weights stay as they are.

    Layers whose sizes are not multiples of 16 stay, as the GPU's instruction requires.

    Raises:
        ConfigError: torchao is not installed.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise ConfigError(
            "precision.compute=fp8 needs torchao: pip install 'hpctrain[fp8]'"
        ) from None

    def fits(module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Linear) or (
            module.in_features % 16 == 0 and module.out_features % 16 == 0
        )

    convert_to_float8_training(model, module_filter_fn=fits)
