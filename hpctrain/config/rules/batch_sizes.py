"""The sizes of a batch, from all ranks down to what a rank computes at a time.

global 512 = shares 8 x accumulate 2 x micro 32        share 64 = accumulate 2 x micro 32
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.shares import shares
from hpctrain.config.schema import Config


@dataclass(frozen=True)
class BatchSizes:
    """How the samples of a step are divided, at the start of a run.

    Attributes:
        global_size: The samples of a step over all ranks (`train.global_batch_size`).
        shares: The equal shares into which they are divided. A rank has one, or with
            `parallel.weights` as many as its weight.
        accumulate: The micro-batches of a share. `train.micro_batch_size=auto` begins with 1.
    """

    global_size: int
    shares: int
    accumulate: int

    @classmethod
    def of(cls, config: Config, degrees: Degrees) -> Self:
        """Return the sizes of a config.

        Args:
            config: Its batch sizes fit together (`problems`).
            degrees: The degrees for the number of ranks.
        """
        train, parts = config.train, shares(config.parallel, degrees.dp)
        number = train.accumulate
        if train.micro_batch_size not in (None, "auto"):
            number = train.global_batch_size // (parts * int(str(train.micro_batch_size)))
        return cls(train.global_batch_size, parts, number)

    @property
    def share(self) -> int:
        """The samples of a share."""
        return self.global_size // self.shares

    @property
    def micro(self) -> int:
        """The samples of a micro-batch."""
        return self.share // self.accumulate


def problems(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield what is wrong with the sizes of the batch and its parts.

    Args:
        config: Every value by itself is valid.
        degrees: The degrees for the number of ranks.
    """
    train, batch = config.train, config.train.global_batch_size
    size, weights = train.micro_batch_size, config.parallel.weights
    if size is not None and train.accumulate != 1:
        yield f"train.micro_batch_size={size} and train.accumulate={train.accumulate}: give one"
    elif size == "auto" and config.parallel.device == "cpu":
        yield "train.micro_batch_size=auto with parallel.device=cpu: it measures a GPU's memory"
    number = int(size) if size is not None and size != "auto" else train.accumulate
    name = "micro_batch_size" if size not in (None, "auto") else "accumulate"
    dp = shares(config.parallel, degrees.dp)
    parts = f"dp {dp}" if weights is None else f"{dp} shares of parallel.weights={weights}"
    share = dp * number
    if batch % share:
        below = batch // share * share
        near = " or ".join(str(size) for size in (below, below + share) if size > 0)
        yield (
            f"train.global_batch_size={batch} is not divisible by {parts} x train.{name} {number} "
            f"= {share}: use {near}"
        )
    if config.data.collate == "pack" and (train.accumulate > 1 or size is not None):
        given = f"accumulate={train.accumulate}" if size is None else f"micro_batch_size={size}"
        yield f"train.{given}: a batch of data.collate=pack is one piece; leave it out"
