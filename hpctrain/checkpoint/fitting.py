"""Whether a checkpoint is one of this model: the names and shapes of its weights.

    checkpoint  a.weight 64 x 8    b.weight     ┐
    model       a.weight 32 x 8    c.weight     ┘ MisfitError: it names these three

torch's own text about this is a traceback that names one of them, and a weight that only the
checkpoint has would be left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hpctrain.checkpoint.matching import misshapen
from hpctrain.distributed import objects
from hpctrain.terminal import few

_SHOWN = 4


def misfit(
    saved: Mapping[str, Any], state: Mapping[str, Any], part: str, *, divided: bool = False
) -> str:
    """Return which weights of a checkpoint are not those of the model; "" if all fit.

    `part` is the first part of the model's names in the checkpoint, such as `model`. If the ranks
    have different weights (`divided`), as in a pipeline, all of them call this together.
    """
    own = list(_differences(saved, state, part))
    there = {key.removeprefix(f"{part}.") for key in saved if key.startswith(f"{part}.")}
    foreign = there - state.keys()
    if divided:
        known = objects.all_gather((own, sorted(foreign)))
        own = [text for texts, _ in known for text in texts]
        foreign = set.intersection(*({*names} for _, names in known))
    found = [*dict.fromkeys(own), *(f"{n} is not in the model" for n in sorted(foreign))]
    return few(found, _SHOWN, "; ")


def _differences(saved: Mapping[str, Any], state: Mapping[str, Any], part: str) -> Iterator[str]:
    """Yield which weights of the model a checkpoint lacks, or has in another shape."""
    for name, value in state.items():
        entry = saved.get(f"{part}.{name}")
        if entry is None:
            yield f"{name} is not in the checkpoint"
        elif isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
            there, here = tuple(entry.size), tuple(value.shape)
            if there != here:
                yield misshapen(name, there, here)
