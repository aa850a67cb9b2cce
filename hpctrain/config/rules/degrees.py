"""The degrees of parallelism: how many ways each dimension divides the work, and what it must.

    dp_replicate 2 x dp_shard 2 x cp 1 x tp 2 x pp 1 = 8 ranks

They divide heads, sequences, experts, the blocks of a pipeline. Of hpctrain's own Transformer the
config says these numbers, so they are checked before a job is queued. Of other models they are
known when the model is built. What a schedule of a pipeline needs, and how long its ranks wait, is
here as well.

This module does not import torch, because the login node checks degrees before it submits a job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import ParallelConfig
from hpctrain.config.schema.parallel import SCHEDULES

_ZERO_BUBBLE = ("zbv", "interleaved_zb")


@dataclass(frozen=True)
class Degrees:
    """The size of each dimension of the mesh."""

    dp_replicate: int = 1  # replicas of the model
    dp_shard: int = 1  # ranks over which each replica is divided
    cp: int = 1  # ranks that divide a sequence (context parallel)
    tp: int = 1  # ranks that divide each layer (tensor parallel)
    pp: int = 1  # stages of a pipeline

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int, job: Callable[[], str] = str) -> Degrees:
        """Return the degrees of a config, in which -1 stands for what the others leave.

        If their product is not the number of ranks, the ConfigError says by `job` how that number
        comes about, such as "2 nodes x 2 tasks = 4".
        """
        asked = {name: getattr(parallel, name) for name in cls.__dataclass_fields__}
        free = [name for name, degree in asked.items() if degree == -1]
        if len(free) > 1:
            raise ConfigError(f"parallel.{free[0]}=-1 and parallel.{free[1]}=-1: one may be -1")
        given = math.prod(degree for degree in asked.values() if degree != -1)
        if free and ranks % given == 0:
            asked[free[0]] = ranks // given
        degrees = cls(**{name: degree for name, degree in asked.items() if degree != -1})
        if degrees.ranks != ranks:
            raise ConfigError(degrees._unequal(free, job() or f"{ranks} ranks"))
        return degrees

    def _unequal(self, free: Sequence[str], job: str) -> str:
        equation = str(self)
        if free:
            equation = equation.replace(f"{free[0]} 1", f"{free[0]} -1").rpartition(" = ")[0]
        return (
            f"parallel: {equation}, but the job has {job}; the product must be the number of "
            "ranks, and one degree may be -1, which takes what is left"
        )

    @property
    def dp(self) -> int:
        """The number of ranks among which the samples of a batch are divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """The product of all degrees."""
        return math.prod(vars(self).values())  # asdict takes 20 us in each step

    def shards(self, parallel: ParallelConfig) -> int:
        """Return the number of ranks that divide each parameter, beside tp and pp."""
        # Those of context parallel divide them with dp_shard, and without it are replicas.
        divides = self.dp_shard > 1 or parallel.fsdp.offload
        return self.dp_shard * self.cp if divides else 1

    def __str__(self) -> str:
        product = " x ".join(f"{name} {degree}" for name, degree in asdict(self).items())
        return f"{product} = {self.ranks}"


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


def expert_problems(
    name: str, experts: int, degrees: Degrees, parallel: ParallelConfig
) -> Iterator[str]:
    """Yield why the experts of a model, `name` in each layer, cannot be computed like this."""
    ep, schedule = parallel.ep, parallel.pipeline.schedule
    if ep > 1 and degrees.tp > 1:
        yield (
            f"{name}={experts} with parallel.ep={ep} and tp {degrees.tp}: data-parallel ranks "
            "divide the experts, use ep 1 or tp 1"
        )
    if degrees.pp > 1 and schedule in _ZERO_BUBBLE:
        yield (
            f"{name}={experts} with parallel.pipeline.schedule={schedule}: use gpipe, 1f1b or "
            "interleaved, experts need a backward pass in one piece"
        )
    if experts % ep:
        near = either(neighbours(factors(experts), ep))
        yield f"parallel.ep={ep} does not divide {name}={experts}: use {near}"


def ep_problems(degrees: Degrees, ep: int) -> Iterator[str]:
    """Yield if ep does not divide the data-parallel ranks, times cp."""
    name = "dp_shard" if degrees.dp_shard > 1 else "dp_replicate"
    size = getattr(degrees, name) * degrees.cp
    if size % ep:
        near = either(neighbours(factors(size), ep))
        name += f" {getattr(degrees, name)} x cp" if degrees.cp > 1 else ""
        yield f"parallel.ep={ep} does not divide {name} {size}: use {near}"


def factors(number: int) -> list[int]:
    """Return all factors of a number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def neighbours(fitting: Sequence[int], number: int) -> list[int]:
    """Return which of the fitting numbers, in ascending order, are next to one that does not."""
    return [*[n for n in fitting if n < number][-1:], *[n for n in fitting if n > number][:1]]


def either(numbers: Iterable[int]) -> str:
    """Return numbers of which one is to be chosen, for a reader."""
    return " or ".join(map(str, numbers))


def sequence_parts(cp: int, tp: int) -> int:
    """Return the number of equal parts into which a sequence must be divisible.

    Context parallel gives each rank two chunks of the same length. Sequence parallel divides these
    two together.
    """
    return tp if cp == 1 else cp * math.lcm(2, tp)


def length_problem(length: int, cp: int, tp: int, more: int = 0) -> str:
    """Return why such a sequence cannot be divided, with the nearest lengths; "" if it can.

    What the user gives is the length of the sequence and so many `more`.
    """
    parts = sequence_parts(cp, tp)
    if length % parts == 0:
        return ""
    given = " with ".join(f"parallel.{k}={n}" for k, n in (("cp", cp), ("tp", tp)) if n > 1)
    verb = "does not divide" if cp == 1 else f"needs {parts} equal parts of"
    without = ", or parallel.sequence_parallel=false"
    return (
        f"{given} {verb} the {length} positions of a sample: use "
        f"{either(n + more for n in nearest(length, parts))}"
        f"{without if tp > 1 and length % sequence_parts(cp, 1) == 0 else ''}"
    )


def nearest(number: int, divisor: int) -> list[int]:
    """Return the multiples of `divisor` next to `number`, of which the lower may be missing."""
    below = number // divisor * divisor
    return [n for n in (below, below + divisor) if n > 0]


def number_problems(numbers: Mapping[str, int], tp: int) -> Iterator[str]:
    """Yield which numbers of a model, such as heads, tp does not divide, and the nearest tp."""
    near = either(neighbours(factors(math.gcd(*numbers.values())), tp))
    for name, number in numbers.items():
        if number % tp:
            yield f"parallel.tp={tp} does not divide {name}={number}: use {near}"


def names_module(pattern: str, name: str) -> bool:
    """Return whether a pattern of a plan, in which * stands for one part, names a module."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
