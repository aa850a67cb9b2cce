"""The errors that a user can cause: `hpctrain.errors` has their names and exit codes."""

from collections.abc import Sequence


class HpctrainError(Exception):
    """Base of the errors that users can cause. The process exits with `exit_code`."""

    exit_code = 1


class ConfigError(HpctrainError):
    """A config key or an argument is unknown or has a bad value."""

    exit_code = 2


class LoopError(ConfigError):
    """A loop of one's own uses its session in another way than it can be used."""


class MisfitError(ConfigError):
    """The weights of a checkpoint have other names or shapes than those of the model."""


class NoGpuError(ConfigError):
    """Ranks that shall use GPUs have none, or not one each.

    Attributes:
        hosts: Those that show fewer GPUs than the job was given there.
    """

    hosts: Sequence[str] = ()


class DataError(HpctrainError):
    """A data set, a shard or a source file is missing, damaged or of another format."""

    exit_code = 3


class LaunchError(HpctrainError):
    """The scheduler refused a request or did not answer."""

    exit_code = 4


class DistributedError(HpctrainError):
    """The ranks cannot form the requested process group."""

    exit_code = 5


class JoinError(DistributedError):
    """This rank could not connect to the others, so there has been no process group yet."""


class LateRankError(DistributedError):
    """A rank did not come to a collective operation within `parallel.timeout_s`."""


class PortTakenError(DistributedError):
    """Another process listens on the port on which rank 0 must wait for the others."""


class StorageError(HpctrainError):
    """A run directory or checkpoint cannot be read or written."""

    exit_code = 6


class InUseError(StorageError):
    """Another process holds the run directory, so this one leaves it as it is."""


class DamageError(StorageError):
    """A file of a run, a data set or a checkpoint is not what a file of its kind must be.

    Attributes:
        file: The file.
        at: The place in it, such as `$.attempts[0].started`; "" for the whole file.
        found: What stands there, as JSON; "" if that is not known.
        allowed: What may stand there.
    """

    def __init__(
        self, file: object, allowed: str, at: str = "", found: str = "", why: str = "is damaged"
    ) -> None:
        self.file, self.at, self.found, self.allowed = str(file), at, found, allowed
        self._why = why
        super().__init__(str(file), allowed, at, found, why)  # with which it is unpickled

    def __str__(self) -> str:
        """Return the sentence."""
        place = f"{self.at} is {self.found}; " if self.found else f"{self.at}: " if self.at else ""
        return f"{self.file} {self._why}: {place}{self.allowed}"


def about(what: str, error: HpctrainError) -> HpctrainError:
    """Return an error with the exit code of another one, which says before it what it is about."""
    kind = StorageError if isinstance(error, DamageError) else type(error)
    return kind(f"{what}: {error}")


class TrackingError(HpctrainError):
    """The MLflow store cannot be used."""

    exit_code = 7


class RefusedError(TrackingError):
    """The store answers, and refuses: a wrong password or token, a deleted experiment."""


def deleted_experiment(uri: str, experiment: str, number: str) -> RefusedError:
    """Return the error for an experiment that was deleted, with the command that restores it."""
    return RefusedError(
        f"tracking.experiment={experiment} was deleted in {uri}: choose another name, or restore "
        f"it: `MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id {number}`"
    )


class HealthError(HpctrainError):
    """The training has produced numbers that are not finite, and may not go on."""

    exit_code = 8


class NodeError(HpctrainError):
    """A node or the cluster does not pass a check, or is slower than it was."""

    exit_code = 9
