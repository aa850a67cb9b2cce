"""Give a model on its ranks the weights that it starts from, before the first step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.engine.checkpoint.saved_state import module_state, plain_name
from hpctrain.engine.checkpoint.stored_weights import StoredWeights
from hpctrain.engine.checkpoint.tensor_reader import copies_apart
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.tensors import dtype_name, is_released
from hpctrain.engine.layers.lora import adapted, is_adapter
from hpctrain.engine.layers.ties import ties
from hpctrain.runs.checkpoints.matching import Dtypes, Match, Rename, match


def start_from(
    module: nn.Module,
    weights: StoredWeights,
    rename: Sequence[Rename] = (),
    skip: Sequence[str] = (),
    stages: dist.ProcessGroup | None = None,
    *,
    all_used: bool = False,
) -> Match:
    """Load the weights whose names the model has, in place; all ranks call this together.

    Adapters (LoRA) are left as they are, and weights that `release` has freed are packed. Returns
    what matched in the whole model, the same on all ranks, whose stages of a pipeline the ranks
    `stages` have. With `all_used` the model must have all that is stored; see
    `Match.refuse_unused`.
    """
    found = compare(module, weights, rename, skip, stages)
    if all_used:
        found.refuse_unused()
    own = weights_of(module)
    released: dict[str, tuple[str, Any]] = {
        f"{plain_name(name)}.weight": (name, layer)
        for name, layer in adapted(module)
        if is_released(layer.get_parameter("weight"))
    }
    here = {name: stored for name, stored in found.stored.items() if name in own}
    targets = {stored: own[name] for name, stored in here.items() if name not in released}
    with copies_apart([targets]) as differ:
        weights.load(targets)
    for name, place in released.items():  # one whole weight at a time
        if name in here:
            whole = torch.empty(own[name].shape, dtype=own[name].dtype, device=own[name].device)
            weights.load({here[name]: whole})
            offered.quantized.pack(*place, whole)
    if stages is not None or any(isinstance(value, DTensor) for value in own.values()):
        differ = [pair for part in objects.all_gather(differ) for pair in part]
    if differ:
        names = {stored: name for name, stored in found.stored.items()}
        first, other = (names[stored] for stored in differ[0])
        raise ConfigError(
            f"{' and '.join(differ[0])} are stored with different values, and {first} and {other} "
            "are one parameter in this model. Let the model have two (model.tied=false; "
            "tie_word_embeddings: false in the config of a model of transformers), or leave one "
            f"out: checkpoint.init_skip=['{other}']"
        )
    return found


def compare(
    module: nn.Module,
    weights: StoredWeights,
    rename: Sequence[Rename] = (),
    skip: Sequence[str] = (),
    stages: dist.ProcessGroup | None = None,
) -> Match:
    """Return which stored weights belong to which of a model, possibly on the meta device."""
    own = {name: value for name, value in weights_of(module).items() if not is_adapter(name)}
    facts = {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in own.items()}
    computed = _computed(module)
    if stages is not None:
        for part, patterns in objects.all_gather((facts, computed), stages):
            facts |= {name: (tuple(shape), dtype) for name, (shape, dtype) in part.items()}
            computed += patterns
    return match(
        weights.shapes,
        {name: shape for name, (shape, _) in facts.items()},
        rename,
        skip,
        first_names(module),
        Dtypes(weights.dtypes, {name: dtype for name, (_, dtype) in facts.items()}),
        lambda name: any(re.search(pattern, name) for pattern in computed),
    )


def _computed(module: nn.Module) -> list[str]:
    """Return regular expressions for what a model computes itself: a stored one is not needed.

    Older files have buffers that are no part of a model's weights any more: the frequencies of a
    rotary embedding, masks, positions. They are the buffers of the model that are not saved, and
    those for which a model of transformers has expressions.
    """
    saved = {plain_name(name) for name in module.state_dict()}
    names = [name for n, _ in module.named_buffers() if (name := plain_name(n)) not in saved]
    found = [getattr(m, "_keys_to_ignore_on_load_unexpected", None) for m in module.modules()]
    given = {pattern for each in found for pattern in each or ()}
    own = [rf"\A{re.escape(name)}\Z" for name in names]
    return [*own, r"rotary_emb\.inv_freq\Z", *sorted(given)]


def names_of_base(module: nn.Module) -> set[str]:
    """Return the names of the parameters that a checkpoint with adapters (LoRA) lacks.

    They are the frozen ones, which have the values of the base. It has every adapter, also one that
    `optimizer.groups` freezes.
    """
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(n) for n, p in named if not (p.requires_grad or is_adapter(n))}


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that are saved, by their plain names; nothing is copied."""
    state = module_state(get_model_state_dict(module))
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of parameters that several modules share, by their others."""
    return {plain_name(other): plain_name(n) for n, others in ties(module) for other in others}
