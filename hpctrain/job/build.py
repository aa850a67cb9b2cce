"""Builds the trainer from the frozen config: objects are made here, the loop only uses them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.config.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.data.feed import Feed
from hpctrain.distributed.long_work import long_work
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import ConfigError
from hpctrain.faults.stop import Stop
from hpctrain.job.build_data import DataBuilder
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.parallel.recipe import parallelize
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.tracker import Tracker
from hpctrain.train.display import Display, choose_display
from hpctrain.train.progress_file import ProgressFile
from hpctrain.train.schedule import Schedule
from hpctrain.train.step import TrainStep
from hpctrain.train.trainer import Every, Trainer


def build(
    config: Config,
    run: RunDir,
    ranks: RankInfo,
    device: torch.device,
    tracker: Tracker,
    stop: Stop,
) -> Trainer:
    """Build the trainer that `config` describes; every rank of the process group calls this.

    Raises:
        ConfigError: A `_target_` cannot be imported or does not take its arguments.
        DataError: A shard is damaged.
    """
    mesh = Mesh(Degrees.of(config.parallel, ranks.world_size), ranks.rank, device)
    precision = Precision(config.precision, device)
    data = DataBuilder(config, ranks, mesh, device, _make)
    # Nodes may differ by hours here: shards are staged on one and are there on another.
    with long_work("preparing the data"):
        loader, evaluation = data.training(), data.evaluation()
    max_steps = _max_steps(config, loader)
    model = parallelize(partial(_make, "model", config.model), config, mesh, precision)
    # Ranks with other samples draw other dropout masks.
    torch.manual_seed(config.seed + 1 + mesh.dp_rank)
    optimizer = _make(
        "optimizer",
        {
            "_target_": config.optimizer._target_,
            "lr": config.optimizer.lr,
            "weight_decay": config.optimizer.weight_decay,
            **config.optimizer.options,
        },
        model.parameters,
    )
    return Trainer(
        train_step=TrainStep(
            model,
            _make("task", config.task),
            optimizer,
            clip_norm=config.train.clip_norm,
            stop=stop,
        ),
        schedule=Schedule(config.optimizer.lr, config.scheduler, max_steps),
        loader=loader,
        evaluation=evaluation,
        checkpointer=Checkpointer(run.checkpoints, config.checkpoint.keep, ranks, model, optimizer),
        tracker=tracker,
        display=_display(config, run, ranks),
        stop=stop,
        device=device,
        max_steps=max_steps,
        global_batch_size=config.train.global_batch_size,
        every=Every(
            log=config.train.log_every,
            evaluate=config.train.eval_every or loader.steps_per_epoch,
            checkpoint=config.checkpoint.every_steps,
        ),
    )


def _display(config: Config, run: RunDir, ranks: RankInfo) -> Display:
    display = choose_display(ranks.is_main)
    if not ranks.is_main:
        return display
    return ProgressFile(display, run.path / "progress.json", config.metric)


def _max_steps(config: Config, loader: Feed) -> int:
    limits = [config.train.max_steps or math.inf]
    if config.train.max_epochs is not None:
        limits.append(config.train.max_epochs * loader.steps_per_epoch)
    return int(min(limits))


def _make(key: str, node: Mapping[str, Any], *args: Any) -> Any:
    """Call the `_target_` of a config section.

    Raises:
        ConfigError: The target cannot be imported, or refuses its arguments.
    """
    try:
        with warnings.catch_warnings():
            # Hydra 1.4 warns when there is no list of allowed targets. Ours may be anything.
            warnings.filterwarnings("ignore", r"(?s).*_execution_whitelist_", UserWarning)
            return instantiate(dict(node), *args, _convert_="all")
    except InstantiationException as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"{key}._target_={node.get('_target_')}: {reason}") from error
