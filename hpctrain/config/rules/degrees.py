"""The degrees of parallelism: how many ways each dimension divides the work.

    dp_replicate 2 x dp_shard 2 x cp 1 x tp 2 x pp 1 = 8 ranks

This module does not import torch, because the login node checks degrees before it submits a job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from hpctrain.base.errors import ConfigError
from hpctrain.config.schema import ParallelConfig


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
