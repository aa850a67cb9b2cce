"""Builds the trainer from the frozen config: objects are made here, the loop only uses them."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from hpctrain.base.files.disk import write_atomically
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.memory_fit import STAGED
from hpctrain.config.optimizer_states import optimizer_states
from hpctrain.config.rules.batch_sizes import BatchSizes, parts_of_ramp
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.config.schema import DataConfig, ParallelConfig, TrainConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.data.generators import seed_generators
from hpctrain.engine.building import observers
from hpctrain.engine.building.build_model import adapted_base, load_initial
from hpctrain.engine.building.build_optimizer import build_optimizer, check_optimizer
from hpctrain.engine.building.build_schedule import Effective, build_schedule
from hpctrain.engine.building.flops import build_utilisation
from hpctrain.engine.building.parts import Parts
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.checkpoint.saved_state import StateSizes
from hpctrain.engine.distributed import objects
from hpctrain.engine.distributed.long_work import long_work
from hpctrain.engine.looking.first_look import LOOKS_AT, FirstLook
from hpctrain.engine.looking.held_values import check_parameters
from hpctrain.engine.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.engine.part import Part
from hpctrain.engine.parts.average import Average
from hpctrain.engine.parts.clocks import Timer
from hpctrain.engine.parts.improvement import Patience
from hpctrain.engine.parts.meter import Meter
from hpctrain.engine.parts.silent_layers import SilentLayers
from hpctrain.engine.parts.slow_ranks import SlowRanks
from hpctrain.engine.parts.watch import Watch
from hpctrain.engine.steps.exchange import Asks, Exchange
from hpctrain.engine.steps.place import Place
from hpctrain.engine.steps.stepping import Every, Stepping
from hpctrain.engine.supervised.evaluations import Evaluations
from hpctrain.engine.supervised.micro_batches import GpuMemory, MicroBatches, Ramp
from hpctrain.engine.supervised.step import TrainStep, Update
from hpctrain.engine.supervised.trainer import TaskPart, Trainer
from hpctrain.errors import ConfigError
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.tracker import Tracker

log = logging.getLogger(__name__)


def build(place: Place) -> Trainer:
    """Build the trainer of a run; every rank of the process group calls this."""
    config, run, ranks, device = place.config, place.run, place.ranks, place.device
    tracker, stop, account = place.tracker, place.stop, place.account
    train, stopping = config.train, config.train.early_stopping
    _check_nodes(config.parallel, ranks)
    parts = Parts(config, ranks, device)
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
    if ranks.is_main:
        log.info("%s", effective)
    tracker.log_params({"effective": asdict(effective)})

    check_parameters(parts.whole_task)
    task, model = parts.task, parts.model()
    if loader.steps.fills_up(effective.max_steps):
        from hpctrain.engine.parallel.preparing.batch_norm import check_filled_up

        check_filled_up(model.module, config.model.get("norm"))
    _show_model(model, run, ranks, tracker)
    load_initial(config.checkpoint, train.lora, config.output_dir, run, ranks, model)
    micro_batches = _micro_batches(config.data, train, run, ranks, model, sizes)

    seed_generators(config.seed)  # one that draws does so alike on all ranks
    optimizer = build_optimizer(config.optimizer, model)
    # Ranks with other samples draw other numbers. Torch draws dropout masks: others also for other
    # layers and other tokens of the same samples.
    seed_generators(config.seed + 1 + mesh.dp_rank, of_torch=config.seed + 1 + mesh.stream)
    check_optimizer(config.optimizer._target_, optimizer, model)
    average = Average(model, train.ema)
    checkpointer = Checkpointer(
        *(run.checkpoints, config.checkpoint.keep, ranks, model, optimizer),
        kept=lambda: [*trained_code.turning_points(run.read())][-1:],
        average=average.tensors,
        base=adapted_base(config.checkpoint, train.lora),
        sizes=StateSizes(optimizer_states(config.optimizer), STAGED / ranks.local_world_size),
    )
    log_every = observers.report_every(train, effective.max_steps)
    notes = observers.build_notes(run, ranks, tracker)
    silent = SilentLayers(model, log_every) if train.watch != "off" else None
    after = 2 * effective.warmup_steps
    watch = Watch(notes, train.watch, max_steps=effective.max_steps, after=after, silent=silent)
    health = observers.build_health(train, run, ranks, watch.seen)
    timer = Timer(config.checkpoint.every_s, decides=ranks.is_main)
    asking: list[Asks] = [stop, timer, checkpointer.saves, *filter(None, [model.unused])]
    exchange = Exchange(mesh, asking)
    update = Update(train.clip_norm, config.optimizer.lr)
    step = TrainStep(model, task, optimizer, update, exchange, health)
    schedule = build_schedule(config.scheduler, effective)
    rows = parts_of_ramp(train, config.parallel, mesh.degrees, mesh.weight)
    evaluated = RequestedMetric.of(config), average
    # They are called in this order, after a step, at a report and between two steps.
    every: list[Part | None] = [
        _look(run, ranks, step, loader, evaluations, effective.max_steps),
        Ramp(model, rows, micro_batches) if rows else None,
        step,
        silent,
        average if train.ema is not None else None,
        micro_batches,
        TaskPart(task),
        observers.build_profile(train.profile, run, ranks),
        *observers.build_hooks(config.hooks, config.seed, step, tracker),
        Evaluations(step, evaluations, train.eval_every, *evaluated),
        schedule,
        Patience(stopping.metric, stopping.min_delta, stopping.patience),
        watch,
    ]
    chosen = [part for part in every if part is not None]
    step.use(chosen)
    meter = Meter(
        loader,
        account,
        SlowRanks(mesh, ranks.rank, ranks.host, say=partial(notes.say, "slow_rank")),
        parts.precision,
        tracker,
        counts_tokens=getattr(task, "counts", "samples") == "tokens",
        utilisation=build_utilisation(
            *(parts.build, model, parts.whole_task, config.hardware, ranks)
        ),
    )
    session = Stepping(
        feed=loader,
        checkpointer=checkpointer,
        exchange=exchange,
        tracker=tracker,
        display=observers.build_display(run, ranks, config.metric),
        stop=stop,
        health=health,
        meter=meter,
        device=device,
        max_steps=effective.max_steps,
        every=Every(log_every, config.checkpoint.every_steps, config.checkpoint.at_end),
        parts=chosen,
        states={"precision": model.precision},
        notes=notes,
        save_timer=timer,
        best=observers.build_best(config.checkpoint, run, ranks, checkpointer),
        counts=lambda: step.totals.counts,
        began_from=place.began_from,
        until=ranks.until,
    )
    return Trainer(session, step, schedule, loader, micro_batches, evaluations)


def _look(
    run: RunDir,
    ranks: RankInfo,
    step: TrainStep,
    loader: DevicePrefetcher,
    evaluations: Mapping[str, DevicePrefetcher],
    max_steps: int,
) -> FirstLook | None:
    """Return the look at the first steps, unless the attempt before has had it."""
    if objects.broadcast(_looked(run) if ranks.is_main else None):
        return None
    feeds = evaluations.values()
    evaluates = any(feed.steps.fills_up(feed.steps_per_epoch) for feed in feeds)
    filled = loader.steps.fills_up(max_steps), evaluates
    return FirstLook(step.model, step.task, step.optimizer, filled)


def _looked(run: RunDir) -> bool:
    """Return whether the attempt before has looked at the same code, on as many ranks."""
    attempts = run.read().attempts
    if len(attempts) < 2:
        return not attempts  # a benchmark keeps nothing of what it trains
    before, now = attempts[-2:]
    if now.code_changed or before.world_size != now.world_size:
        return False
    return run.last_checkpoint() >= (before.first_step or 0) + LOOKS_AT


def _check_nodes(parallel: ParallelConfig, ranks: RankInfo) -> None:
    """Check that there is a weight for each node."""
    weights = parallel.weights
    if weights is not None and len(weights) != ranks.num_nodes:
        raise ConfigError(
            f"parallel.weights={weights}: {len(weights)} numbers, but the job has "
            f"{ranks.num_nodes} nodes; give one for each"
        )


def _show_model(model: ParallelModel, run: RunDir, ranks: RankInfo, tracker: Tracker) -> None:
    """Show the summary of the model in the log, in the run directory and in MLflow."""
    device, summary = model.mesh.device, model.summary
    assert summary is not None
    facts: dict[str, Any] = {  # which forecasts of other runs need
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "parameters": summary.parameters,
    }
    tracker.log_params({"effective": facts})
    if not ranks.is_main:
        return
    log.info("%s", summary)
    file = run.path / "artifacts" / "model.txt"
    with suppress(OSError):  # the log has it, too
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, f"{summary}\n")
        tracker.log_file(file)


def _micro_batches(
    data: DataConfig,
    train: TrainConfig,
    run: RunDir,
    ranks: RankInfo,
    model: ParallelModel,
    sizes: BatchSizes,
) -> MicroBatches | None:
    """Return the micro-batches of the config, or of what an earlier attempt has found."""
    if data.collate == "pack" or model.mesh.degrees.pp > 1:  # a pipeline has their number
        return None
    share = sizes.share * model.mesh.weight
    found = run.read().micro_batch_rows if ranks.is_main else None
    rows: int | None = objects.broadcast(found)
    auto = train.micro_batch_size == "auto"
    if auto and model.precision.device.type != "cuda":
        raise ConfigError("train.micro_batch_size=auto measures a GPU's memory: there is no GPU")
    record = observers.recorder(run, ranks)
    known = rows is not None and sizes.share % rows == 0
    made = MicroBatches(
        model,
        share,
        lambda rows: record(micro_batch_rows=rows),
        GpuMemory() if auto and not known else None,
    )
    if rows is not None and known and (auto or rows < made.rows):
        log.info("micro-batches of %d rows, as the attempt before has found", rows)
        model.accumulate = share // rows
    if rows is not None and not auto:
        made.limit = rows
    return made
