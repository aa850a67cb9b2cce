"""Which ways of spreading a model over ranks, precisions and trainings go together.

Pairs of keys are rows of pairs.yaml; here is what has to be computed. This module does not import
torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hpctrain.config.rules import division
from hpctrain.config.rules.batch_sizes import BatchSizes, named_sizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.division import block_problem, parts_problem
from hpctrain.config.rules.pairs import refused
from hpctrain.config.schema import Config
from hpctrain.config.schema.parallel import SCHEDULES

TRANSFORMER = ("hpctrain.models.Transformer", "hpctrain.models.transformer.Transformer")


def parallel_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit together in `parallel`, `precision` and `train`."""
    parallel = config.parallel
    if (kept := parallel.fsdp.reshard_after_forward) is not None:
        yield from _resharded(kept, parallel.zero, degrees.dp_shard)
    for kind in ("run", "adapters", "sync", "weights"):
        yield from refused(config, kind, degrees)
    if parallel.ep > 1:
        yield from division.ep_problems(degrees, parallel.ep)
    if degrees.pp > 1:
        yield from _pipeline(config, degrees)


def _resharded(kept: int, zero: int, dp_shard: int) -> Iterator[str]:
    """Yield why parameters cannot stay divided over `kept` ranks."""
    key = f"parallel.fsdp.reshard_after_forward={kept}"
    if zero != 3:
        yield f"{key} divides parameters, which parallel.zero={zero} does not"
    elif dp_shard % kept:
        allowed = ", ".join(map(str, ["null", *division.factors(dp_shard)[1:]]))
        yield f"{key}: it must be a factor of dp_shard {dp_shard}: {allowed}"


def sync_problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield why `train.sync_batchnorm=true` is impossible."""
    train = replace(config.train, sync_batchnorm=True)
    return refused(replace(config, train=train), "sync", degrees)


def _pipeline(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit the stages of a pipeline."""
    parallel, train, pp = config.parallel, config.train, degrees.pp
    schedule, blocks = parallel.pipeline.schedule, parallel.pipeline.blocks
    stages, key = pp * SCHEDULES[schedule], f"parallel.pipeline.schedule={schedule}"
    if blocks is not None and len(blocks) != stages:
        yield (
            f"parallel.pipeline.blocks={blocks} has {len(blocks)} numbers: parallel.pp={pp} with "
            f"{key} makes {stages} stages, and each has one"
        )
    elif blocks is not None and min(blocks) < 1:
        yield f"parallel.pipeline.blocks={blocks}: each stage needs at least 1 block"
    if config.data.collate != "pack" and train.micro_batch_size != "auto":
        for key, size in named_sizes(train).items():
            if size % degrees.dp == 0:
                yield from _micro_batches(config, degrees, key, size)


def _micro_batches(config: Config, degrees: Degrees, key: str, size: int) -> Iterator[str]:
    """Yield why the number of micro-batches of a global batch does not fit the schedule."""
    train, pp, schedule = config.train, degrees.pp, config.parallel.pipeline.schedule
    sizes = BatchSizes.of(train, config.parallel, degrees, size)
    parts, share = sizes.accumulate, sizes.share
    if parts == 0 or share % parts or not (reason := parts_problem(schedule, pp, parts)):
        return
    fitting = [n for n in division.factors(share) if not parts_problem(schedule, pp, n)]
    near = division.neighbours(fitting, parts)
    if not near:
        advice = f"{key}={size} is too small for {pp} of them"
    elif train.micro_batch_size is None:
        advice = f"use train.accumulate={division.either(near)}"
    else:
        advice = f"use train.micro_batch_size={division.either(share // n for n in near)}"
    stage = f" and {key}={size}" if train.batch_size_ramp else ""
    yield f"parallel.pipeline.schedule={schedule} with parallel.pp={pp}{stage}: {reason}; {advice}"


def division_problems(config: Config, degrees: Degrees) -> Iterable[str]:
    """Return what the degrees do not divide."""
    is_known = config.model.get("_target_") in TRANSFORMER
    return _divisions(config, degrees) if is_known else ()


def _divisions(config: Config, degrees: Degrees) -> Iterator[str]:
    experts = config.model.get("experts")
    if isinstance(experts, int):
        yield from division.expert_problems("model.experts", experts, degrees, config.parallel)
    layers = config.model.get("layers")
    if degrees.pp > 1 and isinstance(layers, int):
        what = f"model.layers={layers} gives {layers} blocks"
        if problem := block_problem(what, layers, config.parallel, degrees.pp):
            yield problem
    if degrees.ranks == degrees.dp:
        return
    heads = config.model.get("heads")
    numbers = {name: config.model.get(name) for name in ("heads", "kv_heads", "hidden")}
    numbers["kv_heads"] = numbers["kv_heads"] or heads
    known = {f"model.{name}": n for name, n in numbers.items() if isinstance(n, int) and n > 0}
    yield from division.number_problems(known, degrees.tp)
    if config.data.windows.field is not None:
        tp = degrees.tp if config.parallel.sequence_parallel else 1
        length = config.data.windows.length
        # The last token is only a target.
        if problem := division.length_problem(length - 1, degrees.cp, tp, more=1):
            yield f"data.windows.length={length}: {problem}"
