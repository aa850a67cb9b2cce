"""The layout with which other ranks than those of the training use a trained model.

A checkpoint fits any layout. So the ranks that were started decide: tensor and expert parallel stay
where their degrees still divide the ranks, and what is left is data parallel. Where the training
divided the model, the replicas are divided, too (ZeRO-3), so that a rank needs no more memory than
its share.
"""

import dataclasses

from hpctrain.base.errors import ConfigError
from hpctrain.config.rules import batch_sizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import ParallelConfig, TrainConfig


def fit_layout(
    parallel: ParallelConfig, ranks: int, *, whole_outputs: bool = False
) -> tuple[ParallelConfig, str]:
    """Return a layout that fits, and what has changed, for people, or "".

    With `whole_outputs` a rank must have whole outputs of the model, which the stages of a pipeline
    and the parts of a sequence (context parallel) do not have.
    """
    divides = whole_outputs and (parallel.pp > 1 or parallel.cp > 1)
    try:
        Degrees.of(parallel, ranks)
    except ConfigError:
        pass
    else:
        if not divides:
            return parallel, ""
    before, tp = _named(parallel), parallel.tp if ranks % parallel.tp == 0 else 1
    dp = ranks // tp
    sharded = parallel.fsdp.offload or parallel.dp_shard not in (0, 1)
    sharded |= parallel.tp > tp or parallel.pp > 1 or parallel.cp > 1
    fitting = dataclasses.replace(
        parallel,
        dp_replicate=1 if sharded else dp,
        dp_shard=dp if sharded else 1,
        zero=3 if sharded else parallel.zero,
        fsdp=dataclasses.replace(parallel.fsdp, reshard_after_forward=None),
        tp=tp,
        ep=parallel.ep if dp % parallel.ep == 0 else 1,
        pp=1,
        cp=1,
    )
    return fitting, (
        f"the run was trained with {before}; {ranks} rank{'' if ranks == 1 else 's'} now: "
        f"{_named(fitting)} (KEY=VALUE chooses another layout)"
    )


def fit_batch(train: TrainConfig, parallel: ParallelConfig, degrees: Degrees) -> None:
    """Let the batch be one that these ranks can divide, in place; it does not change a result.

    There may be no such batch, which is a ConfigError.
    """
    parallel.weights = None
    train.micro_batch_size, train.batch_size_ramp = None, []
    if degrees.pp == 1:
        train.accumulate = 1
    unit = degrees.dp * train.accumulate
    train.global_batch_size = -(-train.global_batch_size // unit) * unit
    if wrong := list(batch_sizes.problems(train, parallel, degrees)):
        raise ConfigError("\n".join(wrong))


def _named(parallel: ParallelConfig) -> str:
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    degrees = {name: getattr(parallel, name) for name in names}
    return " ".join(f"{name}={n}" for name, n in degrees.items() if n != 1) or "one rank"
