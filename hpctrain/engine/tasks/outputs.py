"""What a model has returned, as a task reads it: the tensor, or an error that describes it."""

from typing import Any

import torch

from hpctrain.errors import ConfigError

# The attributes by which models of libraries return their tensor: transformers, diffusers.
_ATTRIBUTES = ("logits", "sample")


def prediction(outputs: Any, needed: str) -> torch.Tensor:
    """Return the tensor that the model has computed, or say what is `needed` instead.

    It is the output, or its attribute `logits` or `sample`, as the models of transformers and
    diffusers have.
    """
    for name in _ATTRIBUTES:
        outputs = getattr(outputs, name, outputs)
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(
            f"the model returned {described(outputs)}; the task needs a tensor of {needed}, or an "
            "object that has it as its attribute `logits`. A task of your own reads anything: "
            "docs/own-task.md"
        )
    return outputs


def described(value: Any) -> str:
    """Return what a value is, with the dtype and shape of its tensors.

    >>> described((torch.zeros(2, 3), None))
    'a tuple of float32 (2, 3), None'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        items = ", ".join(f"{name}: {described(each)}" for name, each in value.items())
        return f"a dict of {items}" if items else "an empty dict"
    if isinstance(value, tuple | list):
        kind = type(value).__name__
        items = ", ".join(described(each) for each in value)
        return f"a {kind} of {items}" if items else f"an empty {kind}"
    if value is None or isinstance(value, int | float | bool):
        return str(value)
    return f"an object of {type(value).__module__}.{type(value).__qualname__}"
