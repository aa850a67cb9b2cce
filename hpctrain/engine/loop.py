"""Our own loop: one model, one task, one optimizer. A config names it if it names no other loop.

loop: {_target_: hpctrain.supervised} ── build ── the steps of the session, each a TrainStep

The objects are made here from the config; the steps only use them.
"""

import logging
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.forks import forks_end_here
from hpctrain.base.processes.causes import is_out_of_memory
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.config.rules.batch_sizes import BatchSizes, nodes_problem, parts_of_ramp
from hpctrain.data.generators import seed_generators
from hpctrain.engine.building.build_model import adapted_base, load_initial
from hpctrain.engine.building.build_optimizer import build_optimizer, check_optimizer
from hpctrain.engine.building.build_steps import Around, parts_of_user, patience_of
from hpctrain.engine.building.parts import Parts
from hpctrain.engine.distributed.long_work import long_work
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.session import Session
from hpctrain.engine.steps.place import Place
from hpctrain.engine.steps.stepping import Outcome, Stepping
from hpctrain.engine.supervised.evaluations import Evaluations
from hpctrain.engine.supervised.micro_batches import MicroBatches, Ramp
from hpctrain.engine.supervised.schedule import Effective, Schedule
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.engine.tasks.task import TaskState, is_foreign
from hpctrain.runs.run_dir import RunDir

log = logging.getLogger(__name__)


def supervised(session: Session) -> None:
    """Train `model` on `task` with `optimizer` and `scheduler`, as the config has them.

    Out of memory prepares the next attempt, and is raised.
    """
    place = session.place
    trainer = build(place)
    session.use(trainer.session)
    try:
        trainer.fit()
    except RuntimeError as error:
        if is_out_of_memory(error):
            sizes, ranks = trainer.micro_batches, place.ranks
            if sizes is None or (rows := sizes.smaller) is None:
                log.error("out of memory: %s", place.config.cures(ranks.world_size))
            else:
                _lower_micro_batch(place.run, ranks, sizes.rows, rows)
        raise


def _lower_micro_batch(run: RunDir, ranks: RankInfo, rows: int, smaller: int) -> None:
    """Let the next attempt use smaller micro-batches, and ask for it."""
    # The other ranks wait in a collective operation for this one: it cannot repeat the step.
    # `hpctrain.engine.job.verdict` finds this, and lets the batch script start the ranks again.
    run.update(micro_batch_rows=smaller, lowered_in=list(ranks.attempt_key))
    log.error(
        "out of memory with micro-batches of %d rows; the run goes on from its last checkpoint "
        "with %d rows when it is started again",
        *(rows, smaller),
    )
    if ranks.launcher == "slurm" and not epochs.in_loop(run.path, ranks.attempt_key):
        requeue_from_rank(ranks.job_id)


@dataclass
class Trainer:
    """Trains the model of a run with the steps of its session, each an update by one task."""

    session: Stepping
    train_step: TrainStep
    schedule: Schedule
    micro_batches: MicroBatches | None = None

    def fit(self) -> Outcome:
        """Train from the last checkpoint, or from step 0, to the end or a stop request.

        Raises what `Stepping.steps` raises.
        """
        with self.session.closing(), forks_end_here():
            for step, batch in self.session.steps():
                self.train_step(batch, self.schedule(step))
        assert self.session.outcome is not None
        return self.session.outcome


def build(place: Place) -> Trainer:
    """Build the trainer of a run; every rank of the process group calls this."""
    config, run, ranks, tracker = place.config, place.run, place.ranks, place.tracker
    train = config.train
    weights = config.parallel.weights
    if weights is not None and (problem := nodes_problem(weights, ranks.num_nodes)):
        raise ConfigError(problem)
    parts = Parts(config, ranks, place.device)
    mesh = parts.mesh
    # Nodes may differ by hours here: shards are staged on one and are there on another.
    with long_work("preparing the data"):
        loader = parts.data.training()
        evaluations = dict(parts.data.evaluations())

    sizes = BatchSizes.of(train, config.parallel, mesh.degrees)
    effective = Effective.of(
        *(config.optimizer, config.scheduler, train),
        *(sizes, loader.steps_per_epoch, loader.steps.steps_in),
    )
    max_steps = effective.max_steps
    if ranks.is_main:
        log.info("%s", effective)
    tracker.log_params({"effective": asdict(effective)})

    if is_foreign(parts.whole_task):
        offered.check_parameters(parts.whole_task)
    task, model = parts.task, parts.model()
    if loader.steps.fills_up(max_steps):
        from hpctrain.engine.parallel.preparing.batch_norm import check_filled_up

        check_filled_up(model.module, config.model.get("norm"))
    _show_model(place, model)
    if config.checkpoint.init_from is not None:
        load_initial(place, model)
    share = sizes.share * mesh.weight
    micro_batches = MicroBatches.of(share, place, model)

    seed_generators(config.seed)  # one that draws does so alike on all ranks
    optimizer = build_optimizer(config.optimizer, model)
    # Ranks with other samples draw other numbers. Torch draws dropout masks: others also for other
    # layers and other tokens of the same samples.
    seed_generators(config.seed + 1 + mesh.dp_rank, of_torch=config.seed + 1 + mesh.stream)
    check_optimizer(config.optimizer._target_, optimizer, model)
    average = None if train.ema is None else offered.Average(model, train.ema)
    around = Around(
        *(place, mesh, model, optimizer),
        states=config.optimizer.states,
        average=average.tensors if average else {},
        base=adapted_base(config.checkpoint, train.lora),
    )
    if model.unused:
        around.exchange.asking.append(model.unused)
    watch = None
    if train.watch != "off":
        watch = offered.Watch(around.notes, train.watch, max_steps=max_steps)
        around.health.seen = watch.seen
    step = TrainStep(
        *(model, task, optimizer, around.exchange, around.health),
        clip_norm=train.clip_norm,
        base_lr=config.optimizer.lr,
    )
    schedule = Schedule(effective.lr, config.scheduler, max_steps, effective.warmup_steps)
    rows = parts_of_ramp(train, config.parallel, mesh.degrees, mesh.weight)
    profiled = train.profile if ranks.is_main else None
    trained = model.module, optimizer, task
    feeds = loader, evaluations.values()
    # They are called in this order, after a step, at a report and between two steps.
    every: list[Part | None] = [
        offered.FirstLook.of(run, ranks, (model, task, optimizer), *feeds, max_steps),
        Ramp(model, rows, micro_batches) if rows else None,
        step,
        average,
        micro_batches if train.micro_batch_size == "auto" else None,
        offered.ProfiledSteps(profiled, run.path / "profile", ranks.rank) if profiled else None,
        *(parts_of_user(config.hooks, config.seed, tracker, trained) if config.hooks else []),
        Evaluations(
            *(step, evaluations, train.eval_every, config.requested()),
            averaged=average.applied if average else nullcontext,
        ),
        schedule,
        *patience_of(train),
        watch,
    ]
    chosen = [part for part in every if part is not None]
    step.use(chosen)
    session = around.steps(
        *(loader, max_steps, parts.precision, chosen),
        states={"precision": model.precision, "task": TaskState(task)},
        counts=lambda: step.totals.counts,
        counts_tokens=getattr(task, "counts", "samples") == "tokens",
        utilisation=(
            offered.build_utilisation(parts.build, model, parts.whole_task, config.hardware, ranks)
            if config.hardware or place.device.type == "cuda"
            else None
        ),
    )
    return Trainer(session, step, schedule, micro_batches)


def _show_model(place: Place, model: ParallelModel) -> None:
    """Show the summary of the model in the log, in the run directory and in MLflow."""
    device, summary = model.mesh.device, model.summary
    assert summary is not None
    facts: dict[str, Any] = {  # which forecasts of other runs need
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "parameters": summary.parameters,
    }
    place.tracker.log_params({"effective": facts})
    if not place.ranks.is_main:
        return
    log.info("%s", summary)
    file = place.run.path / "artifacts" / "model.txt"
    with suppress(OSError):  # the log has it, too
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, f"{summary}\n")
        place.tracker.log_file(file)
