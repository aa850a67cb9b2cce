"""Builds the trainer from the frozen config: objects are made here, the loop only uses them."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.config.rules.batch_sizes import BatchSizes, parts_of_ramp
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.config.schema import CheckpointConfig, Config, EarlyStoppingConfig, TrainConfig
from hpctrain.data.device_prefetcher import DevicePrefetcher
from hpctrain.disk import write_atomically
from hpctrain.distributed import objects
from hpctrain.distributed.long_work import long_work
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import ConfigError
from hpctrain.faults.health import Health
from hpctrain.faults.late_data import late_told
from hpctrain.faults.stop import Stop
from hpctrain.job.building.build_data import DataBuilder
from hpctrain.job.building.build_model import build_model, build_task
from hpctrain.job.building.build_optimizer import build_optimizer
from hpctrain.job.building.build_schedule import build_schedule
from hpctrain.job.building.build_utilisation import build_utilisation
from hpctrain.job.building.build_watch import build_watch
from hpctrain.job.building.effective import Effective
from hpctrain.job.building.evaluation_jobs import EvaluationJobs
from hpctrain.job.building.initial_weights import adapted_base, load_initial
from hpctrain.job.building.instantiate import instantiate
from hpctrain.job.building.trial.optimizer_trial import OptimizerTrial
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.micro_batches import Memory, MicroBatches
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.preparing.batch_norm import check_filled_up
from hpctrain.parallel.wrappers.parallel_model import ParallelModel
from hpctrain.record import convert
from hpctrain.run_record import BestValue
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.tasks import on_part
from hpctrain.tracking.tracker import Tracker
from hpctrain.training.average import Average
from hpctrain.training.display import Display, choose_display
from hpctrain.training.hooks import Hook, Hooks
from hpctrain.training.improvement import Best, Improvement
from hpctrain.training.measuring.account import Account
from hpctrain.training.measuring.evaluation_timer import EvaluationTimer
from hpctrain.training.measuring.histograms import Histograms, NoHistograms
from hpctrain.training.measuring.meter import Meter
from hpctrain.training.measuring.profiled_steps import ProfiledSteps
from hpctrain.training.measuring.silent_layers import SilentLayers
from hpctrain.training.measuring.slow_ranks import SlowRanks
from hpctrain.training.notes import Notes
from hpctrain.training.progress_file import ProgressFile
from hpctrain.training.step import TrainStep
from hpctrain.training.trainer import Every, Trainer
from hpctrain.training.watch import Watch

log = logging.getLogger(__name__)


def build(
    config: Config,
    run: RunDir,
    ranks: RankInfo,
    device: torch.device,
    tracker: Tracker,
    stop: Stop,
    account: Account,
) -> Trainer:
    """Build the trainer that `config` describes; every rank of the process group calls this."""
    weights = config.parallel.weights
    if weights is not None and len(weights) != ranks.num_nodes:
        raise ConfigError(
            f"parallel.weights={weights}: {len(weights)} numbers, but the job has "
            f"{ranks.num_nodes} nodes; give one for each"
        )
    _check_hosts(config, ranks)
    mesh = Mesh(Degrees.of(config.parallel, ranks.world_size), ranks.rank, device, weights)
    precision = Precision(config.precision, device)
    data = DataBuilder(config, ranks, mesh, device, instantiate)
    # Nodes may differ by hours here: shards are staged on one and are there on another.
    what = "preparing the data"
    with long_work(what), late_told(what):
        loader, evaluation, others = _feeds(config, data)
    sizes = BatchSizes.of(config, mesh.degrees)
    effective = Effective.of(config, loader.steps_per_epoch, sizes, loader.steps_in)
    if ranks.is_main:
        log.info("%s", effective)
    tracker.log_params({"effective": asdict(effective)})
    whole = build_task(config)
    task = on_part(whole, mesh.sequence_part)
    model = build_model(config, mesh, precision, task)
    if loader.fills_up(effective.max_steps):
        check_filled_up(model.module, config.model.get("norm"))
    tracker.log_params({"effective": _facts(model, device)})
    if ranks.is_main:
        _show_summary(model, run, tracker)
    load_initial(config, run, ranks, model)
    micro_batches = _micro_batches(config, run, ranks, model, sizes)
    # Ranks with other samples draw other dropout masks.
    torch.manual_seed(config.seed + 1 + mesh.stream)
    optimizer = build_optimizer(config.optimizer, model)
    layout = OptimizerTrial(config.optimizer, model, optimizer).run()
    average = Average(model, config.train.ema, evaluates=config.train.ema_evaluation)
    checkpointer = Checkpointer(
        *(run.checkpoints, config.checkpoint.keep, ranks, model, optimizer),
        keep_every=config.checkpoint.keep_every,
        kept=[*trained_code.turning_points(run.read())][-1:] if ranks.is_main else (),
        average=average.tensors,
        base=adapted_base(config),
        readers=EvaluationJobs(config, run) if config.evaluation.job and ranks.is_main else None,
        layout=layout,
    )
    notes = _notes(run, ranks, tracker)
    watch = build_watch(config, whole, effective, notes, evaluates=evaluation is not None)
    # The last step of a run is evaluated in any case.
    timed = config.train.eval_every_s is not None
    return Trainer(
        train_step=TrainStep(
            model,
            task,
            optimizer,
            clip_norm=config.train.clip_norm,
            stop=stop,
            health=_health(config.train, run, ranks, watch),
            micro_batches=micro_batches,
            base_lr=config.optimizer.lr,
            average=average,
            timer=EvaluationTimer(config.train.eval_every_s, decides=ranks.is_main),
            histograms=_histograms(config.train.histograms_every, run, tracker),
            silent=SilentLayers(config.train.log_every if config.train.watch != "off" else 0),
            parts=parts_of_ramp(config, mesh.degrees, mesh.weight),
        ),
        schedule=build_schedule(config.scheduler, effective),
        loader=loader,
        evaluation=evaluation,
        other_evaluations=others,
        checkpointer=checkpointer,
        tracker=tracker,
        display=_display(config.metric, run, ranks),
        stop=stop,
        device=device,
        max_steps=effective.max_steps,
        every=Every(
            log=config.train.log_every,
            evaluate=config.train.eval_every or (effective.max_steps if timed else None),
            checkpoint=config.checkpoint.every_steps,
            at_end=config.checkpoint.at_end,
        ),
        meter=Meter(
            loader,
            account,
            _slow_ranks(mesh, run, ranks, notes),
            precision,
            tracker,
            counts_tokens=getattr(task, "counts", "samples") == "tokens",
            utilisation=build_utilisation(config, model, whole, ranks.world_size, ranks.is_main),
        ),
        asked=RequestedMetric.of(config),
        patience=_patience(config.train.early_stopping),
        best=_best(config.checkpoint, run, ranks, checkpointer),
        notes=notes,
        watch=watch,
        hooks=_hooks(config, run, ranks),
    )


def _slow_ranks(mesh: Mesh, run: RunDir, ranks: RankInfo, said: Notes) -> SlowRanks:
    """Return what compares the ranks; rank 0 notes how fast each is, for `parallel.weights`."""

    def record(seconds: list[float]) -> None:
        run.update(rank_s=seconds)

    # Ranks that divide a model wait for each other within a sample, so they tell nothing alone.
    notes = ranks.is_main and mesh.degrees.dp == mesh.degrees.ranks
    say = partial(said.say, "slow_rank")
    return SlowRanks(mesh, ranks.rank, ranks.host, record=record if notes else None, say=say)


def _notes(run: RunDir, ranks: RankInfo, tracker: Tracker) -> Notes:
    if not ranks.is_main:
        return Notes()
    return Notes(
        tracker, run.read().notes, lambda notes: run.update(notes=msgspec.to_builtins(notes))
    )


def _check_hosts(config: Config, ranks: RankInfo) -> None:
    """Warn if the weights were computed for other nodes."""
    hosts = config.parallel.weights_hosts
    if ranks.is_main and config.parallel.weights is not None and hosts:
        here = list(ranks.hosts)
        if here and here != hosts:
            log.warning(
                "parallel.weights=%s was computed for %s, and this job has %s: the result is the "
                "same, but its steps may take longer",
                *(config.parallel.weights, ", ".join(hosts), ", ".join(here)),
            )


def _facts(model: ParallelModel, device: torch.device) -> dict[str, Any]:
    """Return what forecasts of other runs need."""
    assert model.summary is not None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "parameters": model.summary.parameters,
    }


def _show_summary(model: ParallelModel, run: RunDir, tracker: Tracker) -> None:
    """Show the summary of the model in the log, in the run directory and in MLflow."""
    log.info("%s", model.summary)
    file = run.path / "artifacts" / "model.txt"
    with suppress(OSError):  # the log has it, too
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, f"{model.summary}\n")
        tracker.log_file(file)


def _histograms(every: int | None, run: RunDir, tracker: Tracker) -> NoHistograms:
    return NoHistograms() if every is None else Histograms(every, run.path, tracker)


def _feeds(
    config: Config, data: DataBuilder
) -> tuple[DevicePrefetcher, DevicePrefetcher | None, dict[str, DevicePrefetcher]]:
    """Return the feeds of the training, of its evaluation, and of those of more splits by name."""
    if config.evaluation.job:
        return data.training(), None, {}
    loader, evaluation = data.training(), data.evaluation()
    sets = config.data.other_sets.items()
    others = {name: data.evaluation(split, path) for name, (path, split) in sets}
    return loader, evaluation, {name: feed for name, feed in others.items() if feed is not None}


def _patience(stopping: EarlyStoppingConfig) -> Improvement:
    patience = None if stopping.metric is None else stopping.patience
    return Improvement(stopping.metric, stopping.mode, stopping.min_delta, patience)


def _hooks(config: Config, run: RunDir, ranks: RankInfo) -> Hooks:
    made = [instantiate(f"hooks[{i}]", node) for i, node in enumerate(config.hooks)]
    for i, hook in enumerate(made):
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"hooks[{i}]={config.hooks[i]}: it makes a {type(hook).__name__}; it must be a "
                "class that inherits from hpctrain.training.Hook"
            )
    steps, rank = config.train.profile, ranks.rank
    if steps is None or rank not in config.train.profile_ranks:
        return Hooks(made)
    return Hooks(made, ProfiledSteps(steps, run.path / "profile", rank))


def _best(
    config: CheckpointConfig, run: RunDir, ranks: RankInfo, checkpointer: Checkpointer
) -> Best:
    """Return what keeps the best checkpoint; rank 0 notes it in run.json."""

    def record(best: dict[str, Any]) -> None:
        if ranks.is_main and run.read().best != convert(BestValue, best, "best"):
            run.update(best=best)

    return Best(config.best, config.best_mode, record, checkpointer.exists)


def _health(train: TrainConfig, run: RunDir, ranks: RankInfo, watch: Watch) -> Health:
    """Return what judges the steps; rank 0 knows which batches earlier rollbacks left out."""
    known = objects.broadcast([*run.read().left_out] if ranks.is_main else None)

    def record(left_out: list[tuple[int, int]]) -> None:
        if ranks.is_main:
            run.update(left_out=left_out)

    return Health(
        train.nonfinite,
        budget=train.nonfinite_budget,
        window=train.nonfinite_window,
        run=run.path,
        left_out=[(step, consumed) for step, consumed in known],
        record=record,
        seen=watch.seen,
    )


def _micro_batches(
    config: Config, run: RunDir, ranks: RankInfo, model: ParallelModel, sizes: BatchSizes
) -> MicroBatches | None:
    """Return the micro-batches of the config, or of what an earlier attempt has found.

    None where a rank's share of the batch cannot be split, or where a pipeline has the number.
    """
    fixed = config.data.collate == "pack" or config.parallel.ddp.static_graph
    if fixed or model.mesh.degrees.pp > 1:
        return None
    share = sizes.share * model.mesh.weight
    found = run.read().micro_batch_rows if ranks.is_main else None
    rows: int | None = objects.broadcast(found)
    auto = config.train.micro_batch_size == "auto"
    if auto and model.precision.device.type != "cuda":
        raise ConfigError("train.micro_batch_size=auto measures a GPU's memory: there is no GPU")

    def record(rows: int) -> None:
        if ranks.is_main:
            run.update(micro_batch_rows=rows)

    known = rows is not None and sizes.share % rows == 0
    made = MicroBatches(model, share, record, Memory() if auto and not known else None)
    if rows is not None and known and (auto or rows < made.rows):
        log.info("micro-batches of %d rows, as the attempt before has found", rows)
        model.accumulate = share // rows
    if rows is not None and not auto:
        made.limit = rows
    return made


def _display(metric: str, run: RunDir, ranks: RankInfo) -> Display:
    display = choose_display(ranks.is_main, metric)
    if not ranks.is_main:
        return display
    return ProgressFile(display, run.path / "progress.json", metric)
