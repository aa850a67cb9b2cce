"""Formulas of the memory that a model takes on each rank, without its activations.

ZeRO (Rajbhandari et al. 2020) divides model states over N ranks. These are the bytes per parameter
on each rank, with Adam, for fp32 parameters that compute in bf16 by autocast:

| | parameters | gradients | optimizer | gathered copy | sum for N = 64 |
|---|---|---|---|---|---|
| single, ddp | 4 | 4 | 8 | 2 | 18 |
| zero1, zero2 | 4/N | 4/N | 8/N | 2 | 2.25 |
| zero1, `accumulate` > 1 | 4/N | 4 | 8/N | 2 | 6.19 |
| zero3 | 4/N | 4/N | 8/N | 2 for a block | 0.25 |

With parameters in bf16 every 4 becomes 2, every 8 becomes 4, and the 2 of single and ddp becomes 0.
hsdp is zero3 whose N is `dp_shard`. zero1 and zero2 divide the fp32 parameters too, and gather a
copy for each step. The paper's zero1 keeps gradients whole; ours needs to only between the
micro-batches of a step, because otherwise each block's gradients are reduced at once.

A layout fits if a margin stays free: `margin_of` a GPU's memory, and HOST_GB_PER_GPU on the host.
With less it is tight, and may end out of memory. It does not fit if it needs more than there is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.base.units import ELEMENT_BYTES, GIB, readable
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import (
    Config,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from hpctrain.insight.estimates.advice import HOST_GB_PER_GPU
from hpctrain.insight.plan.model_sizes import ModelSizes

# Predicted and measured peaks differ by 2 % as a rule (docs/plan.md), and what torch sees of a GPU
# by 1 % between drivers.
_MARGIN = 0.05
# Public reports of adapters (LoRA, QLoRA) needed 2 to 20 % more than predicted: their tensors are
# predicted well (docs/plan.md), and what other programs and 4 bits need beside them is not.
_ADAPTED_MARGIN = 0.2


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank; with offload, the first three are in the memory of the host."""

    parameters: int  # that the optimizer updates
    gradients: int  # also those that are whole between micro-batches
    optimizer: int
    gathered: int  # put together from all ranks, or converted, for computing
    buffers: int  # gradients of a few blocks before their reduction, and of communication
    peak: int  # the largest sum of a step on the device: not everything exists at the same time
    base: int  # on the device all the time
    begin: int  # what is there beside `base` and the activations when the backward pass begins
    end: int  # what is there beside `base` and the first block's work when it ends

    def with_packed(self, packed: int, unpacked: int) -> Memory:
        """Return the bytes with those of packed weights, and of the one that is unpacked."""
        more = {"parameters": packed, "buffers": unpacked, "peak": packed + unpacked}
        more |= {"base": packed, "begin": unpacked, "end": unpacked}
        return replace(self, **{name: getattr(self, name) + n for name, n in more.items()})


def memory_of(
    sizes: ModelSizes,
    degrees: Degrees,
    training: Config,
    accumulate: int = 1,
    trained: ModelSizes | None = None,
) -> Memory:
    """Return the bytes of each rank by formula; without `trained`, all parameters are trained."""
    compute = _divided if by_fsdp(degrees, training.parallel) else _whole
    return compute(sizes, trained or sizes, degrees, training, accumulate)


def by_fsdp(degrees: Degrees, parallel: ParallelConfig) -> bool:
    """Return whether FSDP2 spreads the model, which converts its parameters for computing."""
    if degrees.shards(parallel) > 1 or parallel.fsdp.offload:
        return True
    divided = degrees.ranks > degrees.dp_replicate or parallel.ep > 1
    return divided and degrees.dp_replicate * degrees.cp > 1


def _whole(
    sizes: ModelSizes, trained: ModelSizes, degrees: Degrees, training: Config, accumulate: int
) -> Memory:
    stored, computed, reduced = _formats(training.precision)
    parallel, count, learnt = training.parallel, sizes.count, trained.count
    # Nothing is left of the gradients of the step before, but DDP keeps its buckets.
    kept = accumulate > 1 or degrees.dp_replicate > 1
    gradients = stored * learnt
    buffers = stored * trained.largest_parameter  # a gradient that is about to be added
    if degrees.dp_replicate > 1:
        # Gradients that are not reduced at once are not views of the buckets at first.
        if accumulate > 1 and parallel.sync != "every":
            gradients *= 2
        if reduced != stored:  # two buckets are under way
            bucket = max(parallel.ddp.bucket_mb * 2**20 / stored, trained.largest_parameter)
            buffers += int(2 * reduced * bucket)
    # Autocast keeps the converted weights for the backward pass.
    gathered = computed * count if computed != stored else 0
    parameters, state = stored * count, stored * learnt * training.optimizer.states
    step = _temporaries(training.optimizer, stored * learnt)
    return Memory(
        *(parameters, gradients, state, gathered, buffers),
        peak=parameters + gradients + state + max(gathered + buffers, step),
        base=parameters + state,
        begin=gathered + (gradients if kept else 0),
        end=gradients + buffers,  # converted weights are freed on the way
    )


def _divided(
    sizes: ModelSizes, trained: ModelSizes, degrees: Degrees, training: Config, accumulate: int
) -> Memory:
    stored, computed, reduced = _formats(training.precision)
    parallel, offload = training.parallel, training.parallel.fsdp.offload
    ranks = degrees.shards(parallel)
    replicas = ranks == 1 and not offload  # FSDP2 keeps parameters, and a copy for computing
    zero = 2 if replicas else parallel.zero
    part, block, rest = sizes.part(ranks), sizes.largest_block, sizes.outside
    whole = sizes.whole(ranks)
    own, learnt, learnt_rest = trained.part(ranks), trained.largest_block, trained.outside
    every = parallel.sync == "every" or (parallel.sync == "auto" and zero > 1)
    every = every and degrees.pp == 1 and not (replicas and parallel.sync == "auto")

    parameters, gradients = stored * part, stored * own
    state = gradients * training.optimizer.states
    # Gradients that wait whole for the last micro-batch, whose backward pass divides them.
    waiting = reduced * trained.whole(ranks) if accumulate > 1 and not every else 0
    # torch keeps the last send buffer, which is that of the rest, until the next micro-batch.
    send = reduced * (max(learnt, learnt_rest) if accumulate > 1 and every else learnt)
    # A block's gradients, those outside of the blocks, and the send buffer of the block before.
    buffers = computed * learnt if waiting else computed * (learnt + learnt_rest) + send
    if degrees.dp_replicate > 1 and reduced != stored:
        # torch keeps the sums over the replicas until the end of the backward pass.
        buffers += reduced * own
    # The parameters outside of the blocks are reduced at the end of the backward pass.
    last = (computed + reduced) * learnt_rest + reduced * learnt_rest // ranks
    divided = 0 if offload else gradients  # with offload they are in the memory of the host
    earlier = waiting or (divided if accumulate > 1 else 0)  # gradients of earlier micro-batches
    if zero == 3:
        kept = parallel.fsdp.reshard_after_forward
        buffers += computed * block  # ahead of the backward pass
        gathered = computed * (block + rest)
        end = divided + max(gathered + buffers, last)
        gathered += computed * (whole - rest) // kept if kept else 0
        # The buffer in which parameters arrive is as large as they are, and is freed late.
        forward = earlier + gathered + computed * (block + rest) + (send if earlier else 0)
    else:
        gathered = computed * whole
        # It stays gathered until the last micro-batch, whose end needs less.
        end = divided + last + (gathered if accumulate > 1 and every else 0)
        forward = earlier + gathered + computed * block
    begin = earlier + gathered + buffers
    step = 0 if offload else gradients + _temporaries(training.optimizer, stored * own)
    base = 0 if offload else parameters + state
    return Memory(
        *(parameters, waiting or gradients, state, gathered, max(buffers, last)),
        peak=base + max(forward, begin, end, step),
        base=base,
        begin=max(forward, begin),
        end=end,
    )


def _formats(precision: PrecisionConfig) -> tuple[int, int, int]:
    """Return the bytes of an element that is stored, that computes, and that is reduced."""
    stored, computed = ELEMENT_BYTES[precision.params], ELEMENT_BYTES[precision.compute]
    return stored, min(stored, computed), ELEMENT_BYTES[precision.reduce or precision.params]


def _temporaries(optimizer: OptimizerConfig, parameters: int) -> int:
    """Return the bytes of the denominators that torch's Adam computes for all at once on a GPU.

    One that is fused has none.
    """
    adam = optimizer._target_.rpartition(".")[2] in ("Adam", "AdamW", "NAdam", "RAdam")
    fused = optimizer.fuses or optimizer.options.get("fused")
    return parameters if adam and not fused else 0


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
