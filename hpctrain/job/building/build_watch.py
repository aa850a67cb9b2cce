"""Builds what watches a run for signs that it learns nothing (`hpctrain.training.watch`)."""

from __future__ import annotations

import math
from contextlib import suppress

import torch.distributed as dist

from hpctrain.config.schema import Config
from hpctrain.data.places.origin import load_index
from hpctrain.distributed import objects
from hpctrain.errors import HpctrainError
from hpctrain.job.building.effective import Effective
from hpctrain.tasks import Classification, LanguageModel, Regression, Task
from hpctrain.training.notes import Notes
from hpctrain.training.watch import Guess, Watch


def build_watch(
    config: Config, task: Task, effective: Effective, notes: Notes, evaluates: bool
) -> Watch:
    """Return what watches the run."""
    train = config.train
    # An average of the parameters follows them late.
    late = 3 / (1 - train.ema) if train.ema and train.ema_evaluation else 0.0
    # Rank 0 reads the index, so that all ranks judge alike.
    found = _guess(config, task) if evaluates and dist.get_rank() == 0 else None
    known = objects.broadcast(found)
    return Watch(
        notes,
        train.watch,
        max_steps=effective.max_steps,
        after=2 * effective.warmup_steps + int(late),
        guess=Guess(*known) if known else None,
        moves=config.checkpoint.init_from is None,
        evaluates=evaluates,
    )


def _guess(config: Config, task: Task) -> Guess | None:
    """Return what the best constant answer would have, by the statistics of the data set."""
    with suppress(HpctrainError, OSError):
        statistics = load_index(config.data.path).statistics.get(str(config.data.val_split), {})
        if isinstance(task, Classification) and task.target in statistics:
            classes = statistics[task.target].classes or {}
            return _most_frequent([n for each, n in classes.items() if each != task.ignore])
        if isinstance(task, Regression) and isinstance(task.target, str):
            found = statistics.get(task.target)
            if found is not None and found.std:
                return Guess("val/mse", found.std**2, 0.0, "always saying the mean")
        if isinstance(task, LanguageModel) and task.tokens in statistics:
            highest = statistics[task.tokens].max
            if highest:
                loss = math.log(highest + 1)
                return Guess("val/loss", loss, 0.0, f"any of {highest + 1:.0f} tokens by chance")
    return None


def _most_frequent(counts: list[int]) -> Guess | None:
    samples = sum(counts)
    if len(counts) < 2 or not samples:
        return None
    shares = [count / samples for count in counts if count]
    most = max(shares)
    margin = 2 * math.sqrt(most * (1 - most) / samples)
    entropy = -sum(share * math.log(share) for share in shares)
    return Guess("val/accuracy", most, margin, "always saying the most frequent class", entropy)
