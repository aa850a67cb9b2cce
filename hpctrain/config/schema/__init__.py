"""The schema of a config: one file per section, one line per key.

The dataclasses own every default; `conf/` only has the choices that a user names, and the values
in which they differ from the defaults. `key.py` explains how a key is declared, and
`python -m hpctrain keys` prints them. A section with a `_target_` (model, task, optimizer,
transforms) takes anything that can be imported.
"""

from hpctrain.config.schema.config import Config
from hpctrain.config.schema.data import BucketsConfig, DataConfig, ImagesConfig, WindowsConfig
from hpctrain.config.schema.evaluation import EvaluationConfig
from hpctrain.config.schema.launch import LaunchConfig
from hpctrain.config.schema.monitor import MonitorConfig
from hpctrain.config.schema.network import NetworkConfig
from hpctrain.config.schema.notify import NotifyConfig
from hpctrain.config.schema.optimizer import OptimizerConfig, PlateauConfig, SchedulerConfig
from hpctrain.config.schema.parallel import DDPConfig, FSDPConfig, ParallelConfig
from hpctrain.config.schema.site import ContainerConfig, SiteConfig
from hpctrain.config.schema.tracking import TrackingConfig
from hpctrain.config.schema.train import (
    CheckpointConfig,
    CompressionConfig,
    EarlyStoppingConfig,
    LocalSGDConfig,
    PrecisionConfig,
    TrainConfig,
)

__all__ = [
    "BucketsConfig",
    "CheckpointConfig",
    "CompressionConfig",
    "Config",
    "ContainerConfig",
    "DDPConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "EvaluationConfig",
    "FSDPConfig",
    "ImagesConfig",
    "LaunchConfig",
    "LocalSGDConfig",
    "MonitorConfig",
    "NetworkConfig",
    "NotifyConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PlateauConfig",
    "PrecisionConfig",
    "SchedulerConfig",
    "SiteConfig",
    "TrackingConfig",
    "TrainConfig",
    "WindowsConfig",
]
