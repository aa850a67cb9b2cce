"""The number of micro-batches that follows from `train.accumulate` or `train.micro_batch_size`."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.config.schema import Config, TrainConfig


def accumulate(train: TrainConfig, dp: int) -> int:
    """Return the micro-batches of a rank in a step, at the start of a run.

    Args:
        train: Its batch sizes fit together (`problems`).
        dp: The number of shares into which the samples are divided.
    """
    if train.micro_batch_size in (None, "auto"):
        return train.accumulate
    return train.global_batch_size // (dp * int(str(train.micro_batch_size)))


def problems(config: Config, dp: int) -> Iterator[str]:
    """Yield what is wrong with the sizes of the batch and its parts.

    Args:
        config: Every value by itself is valid.
        dp: The number of shares into which the samples are divided.
    """
    train, batch = config.train, config.train.global_batch_size
    size = train.micro_batch_size
    if size is not None and train.accumulate != 1:
        yield f"train.micro_batch_size={size} and train.accumulate={train.accumulate}: give one"
    elif size == "auto" and config.parallel.device == "cpu":
        yield "train.micro_batch_size=auto with parallel.device=cpu: it measures a GPU's memory"
    number = int(size) if size is not None and size != "auto" else train.accumulate
    name = "micro_batch_size" if size not in (None, "auto") else "accumulate"
    weights = config.parallel.weights
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
