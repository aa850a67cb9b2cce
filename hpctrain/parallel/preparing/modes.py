"""Training mode: what a model's constructor has chosen for its parts holds for the whole training.

whole model in evaluation mode (transformers' from_pretrained)     all of it is set to train
a part in evaluation mode (a frozen encoder)                       it stays so, and is named
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from hpctrain.parallel.preparing.blocks import path_of
from hpctrain.terminal import few

log = logging.getLogger(__name__)


def prepare_modes(model: nn.Module, *, says: bool) -> None:
    """Set a model to train, in place; parts that its constructor has set to evaluate stay so.

    With `says` rank 0 names these parts in the log.
    """
    if not model.training:
        model.train()
    parts = list(_evaluating("", model))
    if parts and says and dist.get_rank() == 0:
        log.info(
            "%s: in evaluation mode, as the model has made it, and it stays so: no dropout, and "
            "no new statistics of a batch norm",
            few(parts, 1),
        )


def _evaluating(name: str, module: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost parts in evaluation mode."""
    if not module.training:
        yield f"{name} ({type(module).__name__})"
        return
    for key, child in module.named_children():
        yield from _evaluating(path_of(name, key), child)
