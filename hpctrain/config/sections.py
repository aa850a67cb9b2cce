"""Parts of a config: for an attempt at a run, for its loop, and for a model with its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpctrain.base import offered
from hpctrain.config.frozen import plain, targets
from hpctrain.config.identity import chosen
from hpctrain.config.job_request import JobRequest
from hpctrain.config.rules.combinations import sync_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.rules.metrics import RequestedMetric
from hpctrain.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoRAConfig,
    MonitorConfig,
    NetworkConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    SchedulerConfig,
    TrackingConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class LoopSections:
    """What a loop is given of a config: what decides its numbers, and the files that it reads.

    Where and how its jobs run, and who is told of it, are not in it.
    """

    seed: int
    metric: str
    output_dir: str
    model: dict[str, Any]
    task: dict[str, Any]
    hooks: list[dict[str, Any]]
    hardware: dict[str, Any]
    data: DataConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    train: TrainConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    cores: int  # of each rank
    requested: Callable[[], list[RequestedMetric]]  # metrics that only a training can check
    may_sync: Callable[[Degrees], bool]  # whether train.sync_batchnorm is possible
    cures: Callable[[int], str]  # what to change where so many ranks have too little memory

    @classmethod
    def of(cls, config: Config) -> LoopSections:
        """Return these sections of a config."""
        named = [
            *("seed", "metric", "output_dir", "model", "task", "hooks", "hardware", "data"),
            *("optimizer", "scheduler", "train", "precision", "parallel", "checkpoint"),
        ]
        return cls(
            **{name: getattr(config, name) for name in named},
            cores=config.launch.cpus_per_task,
            requested=partial(RequestedMetric.of, config),
            may_sync=lambda degrees: not any(sync_problems(config, degrees)),
            cures=lambda ranks: offered.cures("one row", config, ranks),
        )


@dataclass(frozen=True)
class RunSections:
    """What an attempt at a run is given of a config, beside what its loop is given."""

    of_loop: LoopSections
    job: JobRequest
    loop: dict[str, Any]
    network: NetworkConfig
    monitor: MonitorConfig
    tracking: TrackingConfig
    targets: list[str]  # every `_target_`, whose code is recorded
    # Returns the values that differ from their defaults, or that these overrides name.
    chosen: Callable[[Iterable[str]], dict[str, Any]]

    @classmethod
    def of(cls, config: Config) -> RunSections:
        """Return these sections of a config."""
        return cls(
            *(LoopSections.of(config), JobRequest.of(config), config.loop, config.network),
            *(config.monitor, config.tracking),
            targets=[*targets(plain(config))],
            chosen=partial(chosen, config),
        )


@dataclass(frozen=True)
class ModelSections:
    """How a model is built, and where the weights are that its adapters belong to."""

    model: Mapping[str, Any]
    precision: PrecisionConfig
    seed: int  # what its constructor draws follows from it
    optimizer: OptimizerConfig  # its groups say which parameters are frozen
    blocks: list[str]  # `parallel.blocks`
    lora: LoRAConfig
    start: CheckpointConfig
    output_dir: str  # a run that `checkpoint.init_from` names is in it

    @classmethod
    def of(cls, config: Config) -> ModelSections:
        """Return these sections of a config."""
        return cls(
            *(config.model, config.precision, config.seed, config.optimizer),
            *(config.parallel.blocks, config.train.lora, config.checkpoint, config.output_dir),
        )
