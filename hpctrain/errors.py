"""The errors that a user can cause, with their exit codes.

    HpctrainError            1   (only its subclasses are raised)
    ├── ConfigError          2   a config key, or the command line
    │   ├── MisfitError      2   the model is another one than that of the checkpoint
    │   └── NoGpuError       2   a rank has no GPU, or not one of its own
    ├── DataError            3   shards, index, a source file
    ├── LaunchError          4   the scheduler, submission
    ├── DistributedError     5   ranks, ports, the process group
    │   ├── JoinError        5   the ranks do not reach each other
    │   ├── LateRankError    5   a rank did not come to a collective operation in time
    │   └── PortTakenError   5   another process listens on the port of rank 0
    ├── StorageError         6   the run directory, checkpoints, permissions, space
    │   ├── InUseError       6   another process trains the run
    │   └── DamageError      6   a file is not what its kind must be
    ├── TrackingError        7   the MLflow store
    ├── HealthError          8   a loss, a gradient or a parameter that is not finite
    └── NodeError            9   a node or the cluster does not pass a check, or is slower

A message is one short paragraph with the key or file, its value and what is allowed. The command
line prints it without a traceback; `HPCTRAIN_DEBUG=1` shows the traceback. Exit code 1 is an
exception of the training itself, with its traceback. Exit codes 130 (Ctrl-C) and 143 (SIGTERM or a
time limit) mean that the run saved and stopped on request: the same command resumes it.
"""

from hpctrain.base.errors import (
    ConfigError,
    DamageError,
    DataError,
    DistributedError,
    HealthError,
    HpctrainError,
    InUseError,
    JoinError,
    LateRankError,
    LaunchError,
    LoopError,
    MisfitError,
    NodeError,
    NoGpuError,
    PortTakenError,
    RefusedError,
    StorageError,
    TrackingError,
)

__all__ = [
    "ConfigError",
    "DamageError",
    "DataError",
    "DistributedError",
    "HealthError",
    "HpctrainError",
    "InUseError",
    "JoinError",
    "LateRankError",
    "LaunchError",
    "LoopError",
    "MisfitError",
    "NoGpuError",
    "NodeError",
    "PortTakenError",
    "RefusedError",
    "StorageError",
    "TrackingError",
]
