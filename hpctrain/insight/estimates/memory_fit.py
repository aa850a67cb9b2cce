"""Whether a run has room on its GPUs and on their hosts: the one place that decides.

It fits if a margin stays free: `margin_of` a GPU's memory, and HOST_GB_PER_GPU on the host. With
less it is tight, and may end out of memory. It does not fit if it needs more than there is.
"""

from dataclasses import dataclass

from hpctrain.base.units import GIB, readable
from hpctrain.config.schema import TrainConfig
from hpctrain.insight.estimates.advice import HOST_GB_PER_GPU

# Predicted and measured peaks differ by 2 % as a rule (docs/plan.md), and what torch sees of a GPU
# by 1 % between drivers.
_MARGIN = 0.05
# Public reports of adapters (LoRA, QLoRA) needed 2 to 20 % more than predicted: their tensors are
# predicted well (docs/plan.md), and what other programs and 4 bits need beside them is not.
_ADAPTED_MARGIN = 0.2


@dataclass(frozen=True)
class Fit:
    """What is to be said of the memory of a layout."""

    possible: bool | None  # None if that is unknown
    tight: bool = False
    reason: str = ""  # of what is tight or not possible: "needs 81.0 GiB of 79.2 GiB per GPU"


def margin_of(train: TrainConfig) -> float:
    """Return the part of a GPU's memory that has to stay free."""
    return _ADAPTED_MARGIN if train.lora.patterns else _MARGIN


def on_gpu(
    needed: float, memory: int | None, *, complete: bool = True, margin: float = _MARGIN
) -> Fit:
    """Return whether the bytes of the fullest rank fit into what torch sees of its GPU.

    `memory` is None if it is unknown; without `complete`, `needed` is a lower bound.
    """
    if memory is None:
        return Fit(None)
    text = f"{readable(needed)} of {readable(memory)} per GPU"
    if needed > memory:
        return Fit(False, reason=f"needs {'' if complete else 'at least '}{text}")
    if not complete:
        return Fit(None)
    if needed > (1 - margin) * memory:
        return Fit(True, True, f"needs {text}, so that less than {margin:.0%} stays free")
    return Fit(True)


def on_host(kept: float, ranks: int, mem_gb: float | None) -> Fit:
    """Return whether `launch.mem_gb` has room for what offload keeps there.

    `kept` are the bytes of all `ranks` ranks of a node, each of which has torch, NCCL and a loader
    beside it. Nothing is said against a node whose memory is unknown.
    """
    if not mem_gb or not kept:
        return Fit(True)
    text = f"keeps {readable(kept)} in the host memory of each node, and launch.mem_gb={mem_gb:g}"
    if kept > mem_gb * GIB:
        return Fit(False, reason=text)
    if kept > (mem_gb - HOST_GB_PER_GPU * ranks) * GIB:
        rest = f"leaves each of {ranks} ranks less than {HOST_GB_PER_GPU} GiB beside it"
        return Fit(True, True, f"{text} {rest}")
    return Fit(True)


def worst(*fits: Fit) -> Fit:
    """Return the one that decides."""
    return min(fits, key=lambda one: (one.possible is not False, bool(one.possible), not one.tight))
