"""Builds what looks at a run while it trains: health, notes, the best checkpoint, hooks.

Rank 0 alone writes what they find into run.json (`recorder`).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from hpctrain.base.files.record import convert
from hpctrain.base.names.run_record import BestValue
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import CheckpointConfig, Config, TrainConfig
from hpctrain.engine.building.instantiate import instantiate_all
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.distributed import objects
from hpctrain.engine.faults.health import Health
from hpctrain.engine.parts.hooks import Hook, Hooks
from hpctrain.engine.parts.improvement import Best
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.parts.profiled_steps import ProfiledSteps
from hpctrain.engine.parts.watch import Watch
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.tracker import Tracker


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
