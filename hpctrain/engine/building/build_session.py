"""Builds the steps of a loop of one's own, from what the loop has brought to its session."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from hpctrain.engine.building import observers
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.faults.health import Health
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parallel.precision import Precision
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.parts.clocks import Timer
from hpctrain.engine.parts.improvement import Patience
from hpctrain.engine.parts.meter import Meter
from hpctrain.engine.parts.slow_ranks import SlowRanks
from hpctrain.engine.steps.ending import Ending
from hpctrain.engine.steps.exchange import Exchange
from hpctrain.engine.steps.feeds import Feed, OwnFeed
from hpctrain.engine.steps.kept import Kept
from hpctrain.engine.steps.logged import Logged
from hpctrain.engine.steps.place import Place
from hpctrain.engine.steps.stepping import Every, Stepping
from hpctrain.runs.code import trained_code


def stepping(
    place: Place,
    mesh: Mesh,
    precision: Precision,
    feed: Feed,
    max_steps: int,
    models: Mapping[str, ParallelModel],
    optimizers: Mapping[str, torch.optim.Optimizer],
    kept: Kept,
    ending: Ending,
) -> tuple[Stepping, Logged]:
    """Return the steps, and what takes the numbers that the loop logs."""
    config, run, ranks, tracker = place.config, place.run, place.ranks, place.tracker
    train, saves = config.train, config.checkpoint
    notes = observers.build_notes(run, ranks, tracker)
    health: Health = observers.build_health(train, run, ranks, lambda step, loss: None)
    logged = Logged(mesh, health)
    checkpointer = Checkpointer(
        *(run.checkpoints, saves.keep, ranks, models, optimizers),
        kept=lambda: [*trained_code.turning_points(run.read())][-1:],
    )
    checkpointer.more = kept
    timer = Timer(saves.every_s, decides=ranks.is_main)
    stopping = train.early_stopping
    patience = Patience(stopping.metric, stopping.min_delta, stopping.patience)
    own = observers.build_hooks(config.hooks, config.seed, None, tracker)
    parts: Sequence[Part] = [kept, logged, ending, patience, *own]
    say = partial(notes.say, "slow_rank")
    slow_ranks = SlowRanks(mesh, ranks.rank, ranks.host, say=say)
    measured = feed, place.account, slow_ranks, precision, tracker
    made = Stepping(
        feed=feed,
        checkpointer=checkpointer,
        exchange=Exchange(mesh, [place.stop, timer, checkpointer.saves]),
        tracker=tracker,
        display=observers.build_display(run, ranks, config.metric),
        stop=place.stop,
        health=health,
        meter=Meter(*measured, counts_samples=not isinstance(feed, OwnFeed)),
        device=place.device,
        max_steps=max_steps,
        every=Every(observers.report_every(train, max_steps), saves.every_steps, saves.at_end),
        parts=parts,
        notes=notes,
        save_timer=timer,
        best=observers.build_best(saves, run, ranks, checkpointer),
        began_from=place.began_from,
        until=ranks.until,
    )
    return made, logged
