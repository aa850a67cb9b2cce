"""The schema of a config: one file per section, one line per key.

The dataclasses own every default; `conf/` only has the choices that a user names, and the values
in which they differ from the defaults. `key.py` explains how a key is declared, and
`python -m hpctrain --help keys` prints them. A section with a `_target_` (model, task, optimizer,
transforms) takes anything that can be imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config.schema.data import DataConfig as DataConfig
from hpctrain.config.schema.key import Member, key, keys, members, section
from hpctrain.config.schema.launch import ContainerConfig as ContainerConfig
from hpctrain.config.schema.launch import LaunchConfig as LaunchConfig
from hpctrain.config.schema.launch import SiteConfig as SiteConfig
from hpctrain.config.schema.optimizer import OptimizerConfig as OptimizerConfig
from hpctrain.config.schema.optimizer import PlateauConfig as PlateauConfig
from hpctrain.config.schema.optimizer import SchedulerConfig as SchedulerConfig
from hpctrain.config.schema.parallel import FSDPConfig as FSDPConfig
from hpctrain.config.schema.parallel import NetworkConfig as NetworkConfig
from hpctrain.config.schema.parallel import ParallelConfig as ParallelConfig
from hpctrain.config.schema.parallel import PrecisionConfig as PrecisionConfig
from hpctrain.config.schema.train import CompressionConfig as CompressionConfig
from hpctrain.config.schema.train import LoRAConfig as LoRAConfig
from hpctrain.config.schema.train import TrainConfig as TrainConfig
from hpctrain.config.schema.watching import CheckpointConfig as CheckpointConfig
from hpctrain.config.schema.watching import HangConfig as HangConfig
from hpctrain.config.schema.watching import MonitorConfig as MonitorConfig
from hpctrain.config.schema.watching import TrackingConfig as TrackingConfig


@dataclass
class Config:
    """One training run."""

    name: str = key(
        "run",
        "The name of the run directory begins with this text: letters, digits, '.', '_' and '-'.",
        pattern=(  # the name becomes a folder and an #SBATCH line
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
            "letters, digits, '.', '_' and '-', at most 64 of them",
        ),
        identity=False,
    )
    seed: int = key(
        0, "All random choices of a run follow from this number.", at_least=0, at_most=2**63 - 1
    )
    output_dir: str = key("runs", "This folder holds the run directories.", identity=False)
    metric: str = key(
        "val/accuracy",
        "A sweeper such as Optuna gets the last value of this metric.",
        identity=False,
    )
    scaling: str | None = key(
        None,
        "The run belongs to a series over launch.nodes: with the same global batch (strong), or "
        "with train.global_batch_size as the batch of each node (weak). +scaling=strong or "
        "+scaling=weak sets this key and what such a series needs.",
        choices=(None, "strong", "weak"),
        identity=False,
    )
    loop: dict[str, Any] = key(
        {"_target_": "hpctrain.supervised"},
        "The loop is `_target_`, a function that is called with the session and the other keys.",
    )
    model: dict[str, Any] = key({}, "The model is `_target_`, called with the other keys.")
    task: dict[str, Any] = key(
        {}, "The task (loss and metrics) is `_target_`, called with the other keys."
    )
    data: DataConfig = section(DataConfig)
    hooks: list[dict[str, Any]] = key(
        [],
        "Each of these is a hpctrain.Part, named by `_target_`, whose methods are called around "
        "steps, reports, evaluations and checkpoints; or, for our own loop, a "
        "hpctrain.training.Hook.",
    )
    hardware: dict[str, Any] = key(
        {},
        "The figures of a GPU and its node, for plan, MFU and cost: hardware=NAME takes a file of "
        "conf/hardware.",
        identity=False,
    )
    optimizer: OptimizerConfig = section(OptimizerConfig)
    scheduler: SchedulerConfig = section(SchedulerConfig)
    train: TrainConfig = section(TrainConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    parallel: ParallelConfig = section(ParallelConfig, identity=False)
    network: NetworkConfig = section(NetworkConfig, identity=False)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    monitor: MonitorConfig = section(MonitorConfig, identity=False)
    hang: HangConfig = section(HangConfig, identity=False)
    tracking: TrackingConfig = section(TrackingConfig, identity=False)
    launch: LaunchConfig = section(LaunchConfig, identity=False)
    site: SiteConfig = section(SiteConfig, identity=False)

    @property
    def asked_world_sizes(self) -> range:
        """The numbers of ranks that `launch` requests; one, unless `launch.nodes` is a range."""
        nodes, tasks = self.launch.node_numbers, self.launch.tasks_per_node
        return range(nodes.start * tasks, nodes.stop * tasks, tasks)


def all_keys() -> tuple[Member, ...]:
    """Return every key of a config, without the sections."""
    return keys(Config)


def all_members() -> tuple[Member, ...]:
    """Return every section and key of a config, each section before its keys."""
    return members(Config)
