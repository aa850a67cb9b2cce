"""The parameters of a model, as far as its config tells them: those of our own Transformer and MLP.

Other models have to be built to be counted, which takes torch. An earlier run knows them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from hpctrain.config.rules.own_models import TRANSFORMER

_MLP = ("hpctrain.models.MLP", "hpctrain.models.mlp.MLP")


def parameter_count(model: Mapping[str, Any]) -> int | None:
    """Return the number of parameters, each counted once; None if the config does not tell it."""
    target = model.get("_target_")
    try:
        if target in TRANSFORMER:
            return _of_transformer(model)
        if target in _MLP:
            widths = [model["in_features"], *model["hidden"], model["out_features"]]
            return int(sum((ins + 1) * outs for ins, outs in pairwise(widths)))
    except (KeyError, TypeError, ZeroDivisionError):  # it is wrong: building it says what
        pass
    return None


def _of_transformer(model: Mapping[str, Any]) -> int:
    dim, layers, vocabulary = model["dim"], model["layers"], model["vocab_size"]
    hidden, kind = model.get("hidden"), model.get("mlp", "swiglu")
    if hidden is None:
        hidden = 4 * dim if kind == "gelu" else -(-8 * dim // (3 * 32)) * 32
    bias = bool(model.get("bias"))
    heads = model["heads"]
    width = (model.get("kv_heads") or heads) * (dim // heads)  # of keys, and of values
    attention = 2 * dim * dim + 2 * dim * width + bias * (2 * dim + 2 * width)
    norm = dim * (2 if bias and model.get("norm", "rms") == "layer" else 1)
    dense = _mlp(dim, hidden, bias, 2 if kind == "gelu" else 3)
    experts, wide = model.get("experts"), model.get("expert_hidden") or hidden
    mixed, without = dense, layers
    if experts is not None:
        shared = model.get("shared_experts", 0)
        mixed = experts * (dim + _mlp(dim, wide, False, 3))
        mixed += _mlp(dim, shared * wide, bias, 3) if shared else 0
        without = min(layers, model.get("dense_layers", 0))
    blocks = layers * (attention + 2 * norm) + without * dense + (layers - without) * mixed
    tables = vocabulary * dim * (1 if model.get("tied") else 2)
    positions = (model.get("learned_positions") or 0) * dim
    return int(blocks + tables + positions + norm)


def _mlp(dim: int, hidden: int, bias: bool, matrices: int) -> int:
    return matrices * dim * hidden + bias * ((matrices - 1) * hidden + dim)
