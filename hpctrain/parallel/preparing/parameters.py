"""Parameters that need care: they cannot be divided, counted or judged as others are."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.errors import ConfigError


def check_layers(model: nn.Module) -> None:
    """Refuse layers whose parameters or gradients cannot be divided, counted or judged.

    A ConfigError names a layer that learns its sizes from its first batch, or has sparse gradients.
    """
    for name, module in model.named_modules():
        place = f"model: the layer {name} ({type(module).__name__})" if name else "model: it"
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(map(is_lazy, own)):
            plain = type(module).__name__.removeprefix("Lazy")
            raise ConfigError(
                f"{place} learns its sizes from the first batch, but its parameters must exist "
                "before it: ranks divide them, and the optimizer gets them. Use "
                f"{plain} with its sizes"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{place} has sparse=True, and sparse gradients cannot be added over ranks, "
                "clipped and judged as the others: give sparse=False, which trains the same"
            )


def undivided(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 cannot divide: scalars and complex ones."""
    return [p for p in model.parameters() if p.ndim == 0 or p.is_complex()]
