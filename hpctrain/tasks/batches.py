"""What our tasks take of a batch and of the model's outputs, and in which format they compute."""

from typing import Any

import torch

from hpctrain.base.errors import ConfigError
from hpctrain.data.shards.types import Batch
from hpctrain.engine.tasks.task import described

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


def in_default_dtype(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the format of losses: float32, or float64 with precision=fp64."""
    return x.to(torch.get_default_dtype())


def number_of(counted: torch.Tensor) -> torch.Tensor:
    """Return how many are True, in float64, as the numbers of a step are: it is one kernel less."""
    return counted.sum(dtype=torch.float64)


def field(batch: Batch, name: str, key: str) -> torch.Tensor:
    """Return the field `name` of the batch; `key` is the config key that holds the name."""
    if name not in batch:
        fields = ", ".join(other for other in batch if other != "mask")
        raise ConfigError(f"{key}={name}: the data set's fields are {fields}")
    return batch[name]
