"""The degrees of parallelism: how many ways each dimension divides the work.

    dp_replicate 2 x dp_shard 2 x cp 1 x tp 2 x pp 1 = 8 ranks

This module does not import torch, because the login node checks degrees before it submits a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hpctrain.config.schema import ParallelConfig
from hpctrain.errors import ConfigError


@dataclass(frozen=True)
class Degrees:
    """The size of each dimension of the mesh.

    Attributes:
        dp_replicate: Replicas of the model.
        dp_shard: Ranks over which each replica is divided.
        cp: Ranks that divide a sequence (context parallel).
        tp: Ranks that divide each layer (tensor parallel).
        pp: Stages of a pipeline.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int, job: str = "") -> Degrees:
        """Return the degrees of a config, in which -1 stands for what the others leave.

        Args:
            parallel: The section of the config.
            ranks: The number of ranks of the job.
            job: How the number of ranks comes about, such as "2 nodes x 2 tasks = 4".

        Raises:
            ConfigError: The product of the degrees is not the number of ranks.
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
            equation = str(degrees)
            if free:
                equation = equation.replace(f"{free[0]} 1", f"{free[0]} -1").rpartition(" = ")[0]
            raise ConfigError(
                f"parallel: {equation}, but the job has {job or f'{ranks} ranks'}; the product "
                "must be the number of ranks, and one degree may be -1, which takes what is left"
            )
        return degrees

    @property
    def dp(self) -> int:
        """The number of ranks among which the samples of a batch are divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """The product of all degrees."""
        return math.prod(asdict(self).values())

    def __str__(self) -> str:
        product = " x ".join(f"{name} {degree}" for name, degree in asdict(self).items())
        return f"{product} = {self.ranks}"


def length_problem(length: int, cp: int, tp: int, added: int = 0) -> str:
    """Return why sequences cannot be divided evenly, with the nearest lengths; "" if they can.

    Context parallel cuts 2 * cp chunks, and gives two of them to each rank. Sequence parallel cuts
    these two into tp parts.

    Args:
        length: The positions of a sample.
        cp: The ranks that divide each sequence.
        tp: The ranks of sequence parallel; 1 without it.
        added: What a key has in addition to the positions; the lengths are given as its values.
    """
    multiple = cp * math.lcm(2, tp) if cp > 1 else tp
    if length % multiple == 0:
        return ""
    below = length // multiple * multiple
    near = [str(n + added) for n in (below, below + multiple) if n > 0]
    degrees = [f"parallel.{n}={degree}" for n, degree in (("cp", cp), ("tp", tp)) if degree > 1]
    without = ""
    if tp > 1 and not length_problem(length, cp, 1):
        without = ", or parallel.sequence_parallel=false"
    verb = "does not divide" if cp == 1 else "cannot divide evenly"
    return (
        f"{' with '.join(degrees)} {verb} the {length} positions of a sample: use a length of "
        f"{' or '.join(near)}{without}"
    )


def number_problems(numbers: Mapping[str, int], tp: int) -> Iterator[str]:
    """Yield which numbers of a model tp does not divide, with the nearest tp that does.

    Args:
        numbers: The number of heads, for example, by name.
        tp: The ranks that divide each layer.
    """
    common = math.gcd(*numbers.values())
    fitting = [n for n in range(1, common + 1) if common % n == 0]
    near = [*fitting[: (i := sum(n < tp for n in fitting))][-1:], *fitting[i : i + 1]]
    for name, number in numbers.items():
        if number % tp:
            yield (
                f"parallel.tp={tp} does not divide {name}={number}: use "
                f"{' or '.join(map(str, near))}"
            )
