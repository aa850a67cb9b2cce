"""The names and the config that a model has outside: those of Hugging Face where it has them.

a model of transformers       its own names, and its config.json
hpctrain.models.Transformer   those of Llama where it is one
any other model               its own names
adapters (LoRA)               those of peft, and its adapter_config.json:
                              base_model.model.LAYER.lora_A.weight
"""

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import LoRAConfig
from hpctrain.engine.layers.lora import Adapted, is_adapter
from hpctrain.models import Transformer
from hpctrain.models.layers import SwiGLU

_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@dataclass(frozen=True)
class ExportLayout:
    """How a model is written."""

    sources: dict[str, str]  # the weight of the model that each tensor is, in their order
    config: dict[str, Any] | None  # the content of config.json; None if the model has none
    kind: str  # what it is called in messages


def layout_of(model: nn.Module, names: list[str]) -> ExportLayout:
    """Return the layout of a model, possibly on the meta device."""
    transformers: Any = sys.modules.get("transformers")
    same = {name: name for name in names}
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        return ExportLayout(same, config, "Hugging Face")
    if type(model) is Transformer and _is_llama(model):
        config = _llama_config(model) | {"tie_word_embeddings": "head.weight" not in names}
        return ExportLayout({_of_llama(n): n for n in names}, config, "Llama of Hugging Face")
    return ExportLayout(same, None, "its own names")


def _is_llama(model: Transformer) -> bool:
    blocks: list[Any] = list(model.layers)
    return (
        isinstance(model.norm, nn.RMSNorm)
        and model.positions is None
        and all(isinstance(block.mlp, SwiGLU) for block in blocks)
        and blocks[0].attention.query.bias is None
    )


def _of_llama(name: str) -> str:
    """Return the name of Hugging Face for a weight."""
    module, _, key = name.rpartition(".")
    place = ""
    if name.startswith("layers."):
        _, number, module = module.split(".", 2)
        place = f"{_LLAMA['layers']}.{number}."
    return f"{place}{_LLAMA[module]}.{key}"


def _llama_config(model: Transformer) -> dict[str, Any]:
    numbers, dim = model.plan.numbers, model.embed.embedding_dim
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": dim,
        "intermediate_size": numbers["hidden"],
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": numbers["heads"],
        "num_key_value_heads": numbers["kv_heads"],
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm.eps,
        "rope_theta": model.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.theta},
        "attention_bias": False,
        "mlp_bias": False,
    }


def peft_format(
    model: nn.Module, saved: Iterable[str], lora: LoRAConfig, base: str | None
) -> ExportLayout:
    """Return how the adapters of a checkpoint are written, with the content of adapter_config.json.

    The model, possibly on the meta device, has its adapters, and `base` is where the other weights
    are from. A layer with an adapter that stands in several places is a ConfigError: peft cannot
    have it.
    """
    everywhere = dict(model.named_modules(remove_duplicate=False))
    layers = {name: m for name, m in everywhere.items() if isinstance(m, Adapted)}
    _check_places(model, layers)
    if lora.also:
        raise ConfigError(
            f"train.lora.also={[*lora.also]}: these weights were trained beside the adapters, and "
            "an adapter of peft has no good place for them: export the merged weights, with --merge"
        )
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": any(not isinstance(layer, nn.Linear) for layer in layers.values()),
        "target_modules": _targets(layers, [name for name in everywhere if name]),
        "inference_mode": True,
        "task_type": None,
    }
    # What is no adapter is a buffer, such as the mean of a batch norm.
    there = {name: f"{name}.weight" if is_adapter(name) else name for name in saved}
    sources = {f"base_model.model.{name}": own for own, name in there.items()}
    return ExportLayout(sources, config, "adapters of peft")


def _check_places(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Check that each layer with an adapter is an attribute of one module: peft replaces that."""
    places: dict[int, tuple[int, str]] = {}
    for name, layer in layers.items():
        parent, _, key = name.rpartition(".")
        place = id(model.get_submodule(parent)), key
        if places.setdefault(id(layer), place) != place:
            raise ConfigError(
                f"{name} stands in several places of the model, and peft would add its adapter to "
                "one of them: export the merged weights, with --merge"
            )


def _targets(layers: Mapping[str, Any], modules: Collection[str]) -> list[str] | str:
    """Return the names of the layers; a regular expression where others end in such a name."""
    ends = tuple(f".{layer}" for layer in layers)
    if not any(module.endswith(ends) and module not in layers for module in modules):
        return sorted(layers)
    return f"({'|'.join(map(re.escape, sorted(layers)))})"
