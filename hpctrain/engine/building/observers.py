"""Builds what looks at a run while it trains: health, notes, the best checkpoint, hooks.

Rank 0 alone writes what they find into run.json (`recorder`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hpctrain.base.files.record import convert
from hpctrain.base.names.run_record import BestValue
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import CheckpointConfig, TrainConfig
from hpctrain.engine.building.instantiate import instantiate_all
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.distributed import objects
from hpctrain.engine.faults.health import Health
from hpctrain.engine.part import Part
from hpctrain.engine.parts.display import Display, choose_display
from hpctrain.engine.parts.hooks import Hook, Hooks
from hpctrain.engine.parts.improvement import Best
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.parts.profiled_steps import ProfiledSteps
from hpctrain.engine.parts.progress_file import ProgressFile
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.errors import ConfigError
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.tracker import Tracker

_LOG_EVERY = 200  # steps, at most, where train.log_every says nothing


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


def build_display(run: RunDir, ranks: RankInfo, metric: str) -> Display:
    """Return what shows the progress, to people and to `status`."""
    display = choose_display(ranks.is_main, metric)
    return ProgressFile(display, run.path / "progress.json", metric) if ranks.is_main else display


def report_every(train: TrainConfig, max_steps: int) -> int:
    """Return the steps from one report of metrics to the next, in a run of so many."""
    return train.log_every or max(1, min(_LOG_EVERY, max_steps // 10))


def build_health(
    train: TrainConfig, run: RunDir, ranks: RankInfo, seen: Callable[[int, float], None]
) -> Health:
    """Return what judges the steps; rank 0 knows which batches earlier rollbacks left out."""
    known = objects.broadcast([*run.read().left_out] if ranks.is_main else None)
    record = recorder(run, ranks)
    return Health(
        train.nonfinite,
        run=run.path,
        left_out=[(step, consumed) for step, consumed in known],
        record=lambda left_out: record(left_out=left_out),
        seen=seen,
    )


def build_best(
    config: CheckpointConfig, run: RunDir, ranks: RankInfo, checkpointer: Checkpointer
) -> Best:
    """Return what keeps the best checkpoint."""

    def record(best: dict[str, Any]) -> None:
        if ranks.is_main and run.read().best != convert(BestValue, best, "best"):
            run.update(best=best)

    return Best(config.best, record, checkpointer.exists)


def build_hooks(
    nodes: Sequence[Mapping[str, Any]], seed: int, step: TrainStep | None, tracker: Tracker
) -> list[Part]:
    """Return the parts of the user, and the one that calls the hooks, which our loop alone has."""
    needed = "a class that inherits from hpctrain.Part" + " or hpctrain.training.Hook" * bool(step)
    made = instantiate_all("hooks", nodes, (Part, Hook) if step else Part, needed, seed)
    parts: list[Part] = [each for each in made if isinstance(each, Part)]
    for part in filter(lambda each: each.name, parts):
        part.name = f"hooks.{part.name}"  # none of ours has such a name
    names = [part.name for part in parts if part.name]
    if twice := [name for name in {*names} if names.count(name) > 1]:
        raise ConfigError(f"hooks: two parts have the name {twice[0]!r}, under which each is saved")
    hooks = [each for each in made if not isinstance(each, Part)]
    if step and hooks:
        parts.append(Hooks(hooks, step.model.module, step.optimizer, step.task, tracker))
    return parts


def build_profile(steps: str | None, run: RunDir, ranks: RankInfo) -> ProfiledSteps | None:
    """Return the profiler of `train.profile`, on rank 0."""
    if steps is None or not ranks.is_main:
        return None
    return ProfiledSteps(steps, run.path / "profile", ranks.rank)
