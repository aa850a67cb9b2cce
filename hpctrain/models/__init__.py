"""The models of the experiments that come with hpctrain; any `_target_` may take their place."""

from hpctrain.models.conv import ConvNet
from hpctrain.models.mlp import MLP
from hpctrain.models.model import Model
from hpctrain.models.transformer import Transformer
from hpctrain.models.unet import UNet

__all__ = ["MLP", "ConvNet", "Model", "Transformer", "UNet"]
