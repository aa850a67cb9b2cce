"""Every error that a user can cause, with its exit code.

    HpctrainError            1   (never raised itself)
    ├── ConfigError          2   a key of the config or the command line
    ├── DataError            3   shards, index, a source file
    ├── LaunchError          4   the scheduler, submission
    ├── DistributedError     5   ranks, ports, the process group
    ├── StorageError         6   the run directory, checkpoints, permissions, space
    └── TrackingError        7   the MLflow store

A message is one short paragraph: the key or file, the value, what is allowed. The command line
prints it without a traceback; `HPCTRAIN_DEBUG=1` shows the traceback. Two more exit codes mean
"stopped on request, saved, the same command resumes": 130 (Ctrl-C) and 143 (SIGTERM or a time
limit). 1 is an exception of the training itself, with its traceback.
"""


class HpctrainError(Exception):
    """Base of what users can cause; `exit_code` is the process's."""

    exit_code = 1


class ConfigError(HpctrainError):
    """A key of the config or of the command line is unknown or has a bad value."""

    exit_code = 2


class DataError(HpctrainError):
    """A data set, a shard or a source file is missing, damaged or of another format."""

    exit_code = 3


class LaunchError(HpctrainError):
    """The scheduler refused or could not be asked."""

    exit_code = 4


class DistributedError(HpctrainError):
    """The ranks cannot form the group that was asked for."""

    exit_code = 5


class StorageError(HpctrainError):
    """A run directory or checkpoint cannot be read or written."""

    exit_code = 6


class TrackingError(HpctrainError):
    """The MLflow store is unusable."""

    exit_code = 7
