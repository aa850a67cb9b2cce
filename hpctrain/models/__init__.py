"""The models of the experiments that come with hpctrain; any `_target_` may take their place.

A module is imported when its model is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.models.conv import ConvNet
    from hpctrain.models.mlp import MLP
    from hpctrain.models.model import Model
    from hpctrain.models.transformer import Transformer
    from hpctrain.models.unet import UNet

__all__ = ["MLP", "ConvNet", "Model", "Transformer", "UNet"]
_FILES = {"ConvNet": "conv"}  # the others have the name of their class


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = _FILES.get(name, name.lower())
    value = getattr(importlib.import_module(f"{__name__}.{file}"), name)
    globals()[name] = value
    return value
