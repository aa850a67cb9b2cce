"""Builds what looks at a run while it trains: health, the watch, slow ranks, notes, hooks.

Rank 0 alone writes what they find into run.json (`recorder`).
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.config.schema import CheckpointConfig, Config, DataConfig, TrainConfig
from hpctrain.data.places.origin import load_index
from hpctrain.distributed import objects
from hpctrain.errors import HpctrainError
from hpctrain.faults.health import Health
from hpctrain.job.building.build_schedule import Effective
from hpctrain.job.building.instantiate import instantiate_all
from hpctrain.parallel.mesh import Mesh
from hpctrain.record import convert
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.run_record import BestValue
from hpctrain.runs.run_dir import RunDir
from hpctrain.tasks import Classification, LanguageModel, Regression, Task
from hpctrain.tracking.tracker import Tracker
from hpctrain.training.hooks import Hook, Hooks
from hpctrain.training.improvement import Best
from hpctrain.training.measuring.profiled_steps import ProfiledSteps
from hpctrain.training.measuring.slow_ranks import SlowRanks
from hpctrain.training.notes import Notes
from hpctrain.training.watch import Guess, Watch


def recorder(run: RunDir, ranks: RankInfo) -> Callable[..., None]:
    """Return what writes facts into run.json; on ranks other than 0 it does nothing."""
    return run.update if ranks.is_main else lambda **_: None


def build_notes(run: RunDir, ranks: RankInfo, tracker: Tracker) -> Notes:
    """Return the notes of the run, which go on from those of the attempts before."""
    if not ranks.is_main:
        return Notes()
    return Notes(
        tracker, run.read().notes, lambda notes: run.update(notes=msgspec.to_builtins(notes))
    )


def build_health(train: TrainConfig, run: RunDir, ranks: RankInfo, watch: Watch) -> Health:
    """Return what judges the steps; rank 0 knows which batches earlier rollbacks left out."""
    known = objects.broadcast([*run.read().left_out] if ranks.is_main else None)
    record = recorder(run, ranks)
    return Health(
        train.nonfinite,
        run=run.path,
        left_out=[(step, consumed) for step, consumed in known],
        record=lambda left_out: record(left_out=left_out),
        seen=watch.seen,
    )


def build_slow_ranks(mesh: Mesh, run: RunDir, ranks: RankInfo, notes: Notes) -> SlowRanks:
    """Return what compares the ranks; rank 0 notes how fast each is, for `parallel.weights`."""
    # Ranks that divide a model wait for each other within a sample, so they tell nothing alone.
    told = ranks.is_main and mesh.degrees.dp == mesh.degrees.ranks
    record = (lambda seconds: run.update(rank_s=seconds)) if told else None
    say = partial(notes.say, "slow_rank")
    return SlowRanks(mesh, ranks.rank, ranks.host, record=record, say=say)


def build_best(
    config: CheckpointConfig, run: RunDir, ranks: RankInfo, checkpointer: Checkpointer
) -> Best:
    """Return what keeps the best checkpoint."""

    def record(best: dict[str, Any]) -> None:
        if ranks.is_main and run.read().best != convert(BestValue, best, "best"):
            run.update(best=best)

    return Best(config.best, record, checkpointer.exists)


def build_hooks(config: Config, run: RunDir, ranks: RankInfo) -> Hooks:
    """Return the hooks of the user, and the profiler of `train.profile`."""
    needed = "a class that inherits from hpctrain.training.Hook"
    made = instantiate_all("hooks", config.hooks, Hook, needed, config.seed)
    steps = config.train.profile
    if steps is None or not ranks.is_main:
        return Hooks(made)
    return Hooks(made, ProfiledSteps(steps, run.path / "profile", ranks.rank))


def build_watch(
    config: Config,
    task: Task,
    effective: Effective,
    notes: Notes,
    ranks: RankInfo,
    *,
    evaluates: bool,
) -> Watch:
    """Return what looks for signs that the run learns nothing; see `Watch`."""
    train = config.train
    # An average of the parameters follows them late.
    late = 3 / (1 - train.ema) if train.ema else 0.0
    # Rank 0 reads the index, so that all ranks judge alike.
    known = objects.broadcast(_guess(config.data, task) if evaluates and ranks.is_main else None)
    return Watch(
        notes,
        train.watch,
        max_steps=effective.max_steps,
        after=2 * effective.warmup_steps + int(late),
        guess=Guess(*known) if known else None,
        moves=config.checkpoint.init_from is None,
        evaluates=evaluates,
    )


def _guess(data: DataConfig, task: Task) -> Guess | None:
    """Return what the best constant answer would have, by the statistics of the data set."""
    with suppress(HpctrainError, OSError):
        statistics = load_index(data.path).statistics.get(str(data.val_split), {})
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
