"""Give a model on its ranks the weights that it starts from, before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from hpctrain.checkpoint.matching import Match, Rename, match
from hpctrain.checkpoint.stored_weights import StoredWeights
from hpctrain.checkpoint.tensor_reader import module_state
from hpctrain.distributed import objects
from hpctrain.errors import StorageError
from hpctrain.models.lora import is_adapter


def start_from(
    module: nn.Module,
    weights: StoredWeights,
    rename: Sequence[Rename] = (),
    skip: Sequence[str] = (),
    stages: dist.ProcessGroup | None = None,
) -> Match:
    """Load the weights whose names the model has, in place; all ranks call this together.

    Adapters (LoRA) are left as they are.

    Args:
        module: The model, wrapped or not, divided or not, with memory.
        weights: What is loaded.
        rename: How stored names become those of the model.
        skip: Patterns of names that are not loaded.
        stages: The ranks that have the stages of a pipeline; None without a pipeline.

    Returns:
        What matched in the whole model, the same on all ranks.

    Raises:
        ConfigError: A pattern fits nothing, shapes differ, or nothing matches.
        StorageError: A file cannot be read.
    """
    own = {name: value for name, value in _weights_of(module).items() if not is_adapter(name)}
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    ties = _ties(module)
    if stages is not None:
        parts = objects.all_gather(shapes, stages)
        shapes = {name: tuple(shape) for part in parts for name, shape in part.items()}
    found = match(weights.shapes, shapes, rename, skip, ties)
    weights.load({source: own[name] for name, source in found.stored.items() if name in own})
    return found


def restore(module: nn.Module, weights: StoredWeights, *, trained_only: bool = False) -> None:
    """Load the weights of a checkpoint of the same model, in place; each rank does it alone.

    Args:
        module: The model, wrapped or not, divided or not, with memory.
        weights: Those of the checkpoint.
        trained_only: Whether the checkpoint lacks the weights of the base (LoRA), which are left as
            they are.

    Raises:
        StorageError: The checkpoint lacks a weight, or one has another shape.
    """
    own = _weights_of(module)
    if trained_only:
        left_out = names_of_base(module)
        own = {name: value for name, value in own.items() if name not in left_out}
    ties = _ties(module)
    found = {name: value for name, value in own.items() if name in weights.shapes}
    loaded = {ties.get(name, name) for name in found}
    for name, value in own.items():
        shape = weights.shapes.get(name)
        if shape is None and ties.get(name, name) not in loaded:
            raise StorageError(f"the checkpoint has no {name}: it is that of another model")
        if shape is not None and shape != tuple(value.shape):
            raise StorageError(
                f"{name} has the shape {shape} in the checkpoint and {tuple(value.shape)} in the "
                "model: it is the checkpoint of another model"
            )
    weights.load(found)


def restore_average(module: nn.Module, average: StoredWeights) -> None:
    """Give a model the average of its parameters, in place; each rank does it alone.

    Args:
        module: The model, wrapped or not, divided or not, with the weights of the checkpoint.
        average: That of the checkpoint (`open_weights` of its part "ema").

    Raises:
        StorageError: The checkpoint has none.
    """
    if not average.shapes:
        raise StorageError("the checkpoint has no average of the parameters (train.ema)")
    own = _weights_of(module)
    average.load({name: value for name, value in own.items() if name in average.shapes})


def names_of_base(module: nn.Module) -> set[str]:
    """Return the names of the parameters that a checkpoint with adapters (LoRA) lacks.

    They are the frozen ones, which have the values of the base. It has every adapter, also one that
    `optimizer.groups` freezes.

    Args:
        module: The model, wrapped or not, in which what is not trained needs no gradient.
    """
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(n) for n, p in named if not (p.requires_grad or is_adapter(n))}


def _weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that are saved, by their names in the plain model.

    They share memory with the module.
    """
    state = module_state(get_model_state_dict(module))
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _ties(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that several modules share."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        plain = plain_name(name)
        ties[plain] = first.setdefault(id(parameter), plain)
    return ties


_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return the name in the plain model, without what DDP, the compiler and others add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
