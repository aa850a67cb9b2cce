"""What a schedule of a pipeline needs, and the part of the time in which its ranks wait.

This module does not import torch, because the login node checks a config before it submits a job.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.config.rules.batch_sizes import BatchSizes, named_sizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, ParallelConfig
from hpctrain.config.schema.parallel import SCHEDULES

_ZERO_BUBBLE = ("zbv", "interleaved_zb")


def bubble(schedule: str, pp: int, parts: int) -> float:
    """Return the expected fraction of a step in which a rank of `pp` waits for the others.

    It is (p - 1) / (m + p - 1) for p stages and m micro-batches, the parts of a step (Huang et al.
    2019), and m is multiplied by the stages of a rank (Narayanan et al. 2021). For the zero-bubble
    schedules (Qi et al. 2023) the forward pass and the two halves of the backward pass take the
    same time; zbv then has no bubble from 2 p - 1 micro-batches on.
    """
    if schedule == "zbv":
        return max(0.0, 1 - parts / (2 * pp - 1))
    work = SCHEDULES[schedule] * parts * (3 if schedule == "interleaved_zb" else 1)
    return (pp - 1) / (work + pp - 1)


def block_problem(what: str, count: int, parallel: ParallelConfig, pp: int) -> str:
    """Return why the stages cannot divide the blocks of a model among themselves; "" if they can.

    `what` has these blocks, such as "Transformer has 4 blocks (layers)".
    """
    stages, asked = pp * SCHEDULES[parallel.pipeline.schedule], parallel.pipeline.blocks
    if count < stages:
        return (
            f"parallel.pp={pp} with parallel.pipeline.schedule={parallel.pipeline.schedule} makes "
            f"{stages} stages, but {what}, and each stage needs one"
        )
    if asked is None or sum(asked) == count:
        return ""
    even = [count // stages + (i < count % stages) for i in range(stages)]
    return f"parallel.pipeline.blocks={asked} has {sum(asked)} blocks, but {what}, such as {even}"


def problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what does not fit a pipeline."""
    parallel, train, pp = config.parallel, config.train, degrees.pp
    schedule, blocks = parallel.pipeline.schedule, parallel.pipeline.blocks
    if pp == 1:
        return
    stages = pp * SCHEDULES[schedule]
    if blocks is not None and len(blocks) != stages:
        yield (
            f"parallel.pipeline.blocks={blocks} has {len(blocks)} numbers: parallel.pp={pp} with "
            f"parallel.pipeline.schedule={schedule} makes {stages} stages, and each has one"
        )
    elif blocks is not None and min(blocks) < 1:
        yield f"parallel.pipeline.blocks={blocks}: each stage needs at least 1 block"
    if schedule in _ZERO_BUBBLE:
        if parallel.zero == 3 and (degrees.dp_shard > 1 or parallel.fsdp.offload):
            yield (
                f"parallel.pipeline.schedule={schedule} with parallel.zero=3: torch computes wrong "
                "gradients; use zero=2, zero=1 or the schedule interleaved"
            )
        if train.compile != "off":
            yield (
                f"parallel.pipeline.schedule={schedule} with train.compile={train.compile}: torch "
                "cannot split a compiled backward pass; use train.compile=off or interleaved"
            )
        if train.activation_checkpointing == "selective":
            yield (
                f"parallel.pipeline.schedule={schedule} with "
                "train.activation_checkpointing=selective: torch cannot split such a backward "
                "pass; use full, none or the schedule interleaved"
            )
    if parallel.sync == "every":
        yield (
            f"parallel.sync=every with parallel.pp={pp}: a pipeline reduces gradients once per "
            "step; use auto or last"
        )
    if config.data.collate == "pack":
        yield f"data.collate=pack with parallel.pp={pp}: a packed batch has no micro-batches"
    elif train.micro_batch_size == "auto":
        yield (
            f"train.micro_batch_size=auto with parallel.pp={pp}: the ranks need different memory; "
            "give a number, or train.accumulate"
        )
    else:
        for key, size in named_sizes(config).items():
            if size % degrees.dp == 0:
                yield from _micro_batches(config, degrees, key, size)


def _micro_batches(config: Config, degrees: Degrees, key: str, size: int) -> Iterator[str]:
    """Yield why the number of micro-batches of a global batch does not fit the schedule."""
    train, pp, schedule = config.train, degrees.pp, config.parallel.pipeline.schedule
    sizes = BatchSizes.of(config, degrees, size)
    parts, share = sizes.accumulate, sizes.share
    if parts == 0 or share % parts or not (reason := _reason(schedule, pp, parts)):
        return
    fitting = [n for n in range(1, share + 1) if share % n == 0 and not _reason(schedule, pp, n)]
    near = [*[n for n in fitting if n < parts][-1:], *[n for n in fitting if n > parts][:1]]
    name, values = "train.accumulate", near
    if train.micro_batch_size is not None:
        name, values = "train.micro_batch_size", [share // n for n in near]
    advice = f"use {name}={' or '.join(map(str, values))}"
    if not near:
        advice = f"{key}={size} is too small for {pp} of them"
    stage = f" and {key}={size}" if train.batch_size_ramp else ""
    yield f"parallel.pipeline.schedule={schedule} with parallel.pp={pp}{stage}: {reason}; {advice}"


def _reason(schedule: str, pp: int, parts: int) -> str:
    """Return why a schedule cannot have this number of micro-batches; "" if it can.

    With fewer micro-batches than ranks, some ranks would always wait. torch refuses it for 1f1b,
    and takes it for the others.
    """
    rounds = max(1, parts // pp)
    if parts < pp:
        return f"{parts} micro-batches are fewer than the {pp} ranks of the pipeline"
    if schedule.startswith("interleaved") and parts % rounds:
        return f"{parts} micro-batches cannot be divided into {rounds} rounds"
    return ""
