"""Builds the steps of a run for any loop: what is around them is the same for ours and for others.

Around ── notes, health, checkpointer, exchange ── the loop's step and parts ── Around.steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.base.files.record import convert
from hpctrain.base.names.run_record import BestValue, Note
from hpctrain.config.schema import TrainConfig
from hpctrain.engine.building.instantiate import instantiate_all
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.distributed import objects
from hpctrain.engine.faults.health import Health
from hpctrain.engine.feeds import Feed
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.reducing.scalars import Exchange
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.parts.display import Display, ProgressFile, choose_display
from hpctrain.engine.parts.improvement import Best, Patience
from hpctrain.engine.parts.meter import Meter
from hpctrain.engine.parts.notes import Notes
from hpctrain.engine.steps.place import Place
from hpctrain.engine.steps.saving import Saving, Timer
from hpctrain.engine.steps.stepping import Stepping
from hpctrain.engine.tasks.task import Task
from hpctrain.runs.code import trained_code
from hpctrain.tracking.tracker import Tracker

_LOG_EVERY = 200  # steps, at most, where train.log_every says nothing


def report_every(train: TrainConfig, max_steps: int) -> int:
    """Return the steps from one report of metrics to the next, in a run of so many."""
    return train.log_every or max(1, min(_LOG_EVERY, max_steps // 10))


class Around:
    """What is around the steps of a loop; all ranks make it together.

    The models and optimizers are those of the checkpoints, and `options` those of a `Checkpointer`.

    Attributes:
        health: Judges each step.
        exchange: Makes the one reduction of a step.
        notes: Those of the run, which go on from those of the attempts before.
    """

    def __init__(
        self,
        place: Place,
        mesh: Mesh,
        model: ParallelModel | Mapping[str, ParallelModel],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        run, ranks, saves = place.run, place.ranks, place.config.checkpoint
        self._place, self._mesh = place, mesh
        self.checkpointer = Checkpointer(
            *(run.checkpoints, saves.keep, ranks, model, optimizer),
            kept=lambda: [*trained_code.turning_points(run.read())][-1:],
            **options,
        )
        by_clock = [] if saves.every_s is None else [Timer(saves.every_s, decides=ranks.is_main)]
        self._timer = next(iter(by_clock), None)

        def record_notes(notes: list[Note]) -> None:
            place.record(notes=msgspec.to_builtins(notes))

        self.notes, left_out = Notes(), []
        if ranks.is_main:
            known = run.read()
            self.notes = Notes(place.tracker, known.notes, record_notes)
            left_out = [*known.left_out]
        # Rank 0 knows which batches earlier rollbacks left out.
        self.health = Health(
            place.config.train.nonfinite,
            run=run.path,
            left_out=[(step, consumed) for step, consumed in objects.broadcast(left_out)],
            record=lambda left_out: place.record(left_out=left_out),
        )
        self.exchange = Exchange(mesh, [place.stop, *by_clock, self.checkpointer.saves])

    def steps(
        self,
        feed: Feed,
        max_steps: int,
        precision: Precision,
        parts: Sequence[Part],
        *,
        states: Mapping[str, Any] = {},
        counts: Callable[[], Mapping[str, float]] = dict,
        **measured: Any,
    ) -> Stepping:
        """Return the steps with these parts; `measured` are options of the `Meter`."""
        place, config = self._place, self._place.config
        run, ranks, saves = place.run, place.ranks, config.checkpoint

        def record(best: dict[str, Any]) -> None:
            if ranks.is_main and run.read().best != convert(BestValue, best, "best"):
                run.update(best=best)

        best = Best(saves.best, record, self.checkpointer.exists)
        slow = None
        if ranks.world_size > 1:
            say = partial(self.notes.say, "slow_rank")
            slow = offered.slow_ranks.SlowRanks(self._mesh, ranks.rank, ranks.host, say=say)
        display = Display()
        if ranks.is_main:
            shown, file = choose_display(config.metric), run.path / "progress.json"
            display = ProgressFile(shown, file, config.metric)
        return Stepping(
            feed=feed,
            saving=Saving(self.checkpointer, saves.every_steps, self._timer, best),
            exchange=self.exchange,
            tracker=place.tracker,
            display=display,
            stop=place.stop,
            health=self.health,
            meter=Meter(feed, place.account, slow, precision, place.tracker, **measured),
            max_steps=max_steps,
            log_every=report_every(config.train, max_steps),
            parts=parts,
            states=states,
            notes=self.notes,
            counts=counts,
            began_from=place.began_from,
            until=ranks.until,
        )


def patience_of(train: TrainConfig) -> list[Part]:
    """Return the part that ends a training early, if `train.early_stopping` has a metric."""
    stopping = train.early_stopping
    if stopping.metric is None:
        return []
    return [Patience(stopping.metric, stopping.min_delta, stopping.patience)]


def parts_of_user(
    nodes: Sequence[Mapping[str, Any]],
    seed: int,
    tracker: Tracker,
    trained: tuple[nn.Module, torch.optim.Optimizer, Task] | None = None,
) -> list[Part]:
    """Return the parts that the key `hooks` names, and the one that calls its hooks.

    Only our loop has hooks, which see what is `trained`; a loop of one's own has parts alone.
    """
    needed = "a class that inherits from hpctrain.Part"
    needed += " or hpctrain.training.Hook" if trained else ""
    hook = offered.hooks
    made = instantiate_all("hooks", nodes, (Part, hook.Hook) if trained else Part, needed, seed)
    parts: list[Part] = [each for each in made if isinstance(each, Part)]
    for part in filter(lambda each: each.name, parts):
        part.name = f"hooks.{part.name}"  # none of ours has such a name
    names = [part.name for part in parts if part.name]
    if twice := [name for name in {*names} if names.count(name) > 1]:
        raise ConfigError(f"hooks: two parts have the name {twice[0]!r}, under which each is saved")
    hooks = [each for each in made if not isinstance(each, Part)]
    return [*parts, hook.Hooks(hooks, *trained, tracker)] if trained and hooks else parts
