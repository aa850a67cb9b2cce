"""The adapters of a run as Hugging Face's peft reads them: names of tensors, and a config.

    layer.lora_A                    base_model.model.layer.lora_A.weight
    layer.bias, beside an adapter   base_model.model.layer.base_layer.bias
    head.weight                     base_model.model.head.weight; `modules_to_save` names head

peft copies a module of `modules_to_save`, with all that the module holds, and saves the copy again.
A parameter of a module that has adapters inside cannot be part of such a copy: its value replaces
that of the base when the adapters are loaded.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from hpctrain.config.schema import LoRAConfig
from hpctrain.errors import ConfigError
from hpctrain.models.lora import Adapted, is_adapter
from hpctrain.models.ties import ties
from hpctrain.trained.exporting.layouts import Piece

_PREFIX = "base_model.model."


def peft_format(
    model: nn.Module, saved: Iterable[str], lora: LoRAConfig, base: str | None
) -> tuple[list[Piece], dict[str, Any]]:
    """Return how the adapters of a checkpoint are written, and the content of adapter_config.json.

    The model, possibly on the meta device, has its adapters, and `base` is where the other weights
    are from. A layer with an adapter that stands in several places is a ConfigError: peft cannot
    have it.
    """
    everywhere = dict(model.named_modules(remove_duplicate=False))
    layers = {name: m for name, m in everywhere.items() if isinstance(m, Adapted)}
    _check_places(model, layers)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    groups = [[first, *others] for first, others in ties(model)]
    same = {name: group for group in groups for name in group}
    kept = {other: None for name in saved for other in same.get(name, [name])}
    trained = [name for name in kept if name in parameters and not is_adapter(name)]
    copied = _copied({name.rpartition(".")[0] for name in trained}, layers)
    pieces = {}
    for name in kept:
        module, _, key = name.rpartition(".")
        if is_adapter(name):
            pieces[f"{name}.weight"] = name
        else:
            pieces[f"{module}.base_layer.{key}" if module in layers else name] = name
    pieces |= {name: name for name in model.state_dict() if _within(name, copied)}
    beside = {name.rpartition(".") for name in trained if name.rpartition(".")[0] in layers}
    modules = [name for name in everywhere if name]
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "all" if any(key == "bias" for _, _, key in beside) else "none",
        "fan_in_fan_out": any(not isinstance(layer, nn.Linear) for layer in layers.values()),
        "target_modules": _targets(layers, modules),
        "modules_to_save": [_unique(name, modules) for name in sorted(copied)] or None,
        "inference_mode": True,
        "task_type": None,
    }
    return [Piece(_PREFIX + name, (own,)) for name, own in pieces.items()], config


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


def _copied(modules: Collection[str], layers: Mapping[str, Any]) -> set[str]:
    """Return the modules that peft can copy: they have no adapters inside, nor does one another."""
    free = {m for m in modules if m and not any(_within(layer, [m]) for layer in layers)}
    return {m for m in free if not _within(m, free - {m})}


def _within(name: str, modules: Iterable[str]) -> bool:
    """Return whether this is the name of a module, or of something inside of it."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _targets(layers: Mapping[str, Any], modules: Collection[str]) -> list[str] | str:
    """Return the names of the layers; a regular expression where others end in such a name."""
    ends = tuple(f".{layer}" for layer in layers)
    if not any(module.endswith(ends) and module not in layers for module in modules):
        return sorted(layers)
    return f"({'|'.join(map(re.escape, sorted(layers)))})"


def _unique(name: str, modules: Collection[str]) -> str:
    """Return what no other name ends in, since peft compares the ends of names."""
    alone = sum(module.endswith(name) for module in modules) == 1
    return name if alone else _PREFIX + name
