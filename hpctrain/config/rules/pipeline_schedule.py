"""What a schedule of a pipeline needs, and the part of the time in which its ranks wait.

This module does not import torch, because the login node checks a config before it submits a job.
"""

from hpctrain.config.schema import ParallelConfig
from hpctrain.config.schema.parallel import SCHEDULES

ZERO_BUBBLE = ("zbv", "interleaved_zb")


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


def parts_problem(schedule: str, pp: int, parts: int) -> str:
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
