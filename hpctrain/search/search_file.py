"""search.json in the folder of a search: what is searched, and what the workers need to go on.

sweeps/2026-01-31_12-00-00/
search.json    this file
bases/         the composed config of each combination of choices (`trial_config`)
sweep.json     the runs of the trials, for `status`, `report`, `cancel` and so on
decision       the lock under which a worker decides what it does next
trials/7       the lock of trial 7: its owner holds it
workers/0/     a worker: worker.json, logs/
workers/array-0/   job.sh, tasks, batch/, job_id: the array of these workers

Optuna's study has the trials and two attributes: `folder`, that of the search, and `ended`, which
says why the search is over. All else is here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from hpctrain.disk import write_atomically
from hpctrain.errors import ConfigError
from hpctrain.record import read, written
from hpctrain.search.settings import Settings
from hpctrain.secrets import expand, reference

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

_NAME = "search.json"


class SearchFile(Settings, frozen=True, kw_only=True):
    """The content of search.json."""

    VERSION: ClassVar[int] = 1

    study: str
    storage: str  # the path of the journal, or a URL of Optuna
    uid: str = ""  # of the parent run in MLflow
    sweeps: dict[str, str] = msgspec.field(default_factory=dict)  # the words of each searched key
    space: dict[str, str] = msgspec.field(default_factory=dict)  # Optuna's JSON of each
    overrides: tuple[str, ...] = ()  # of every trial
    choices: tuple[str, ...] = ()  # the searched keys that choose files, such as `model`
    cwd: str = ""  # where the command was given
    output_dir: str = ""  # with the run directories
    code: str | None = None  # the digest of the code snapshot
    pythonpath: tuple[str, ...] = ()  # its folders

    @classmethod
    def of(cls, sweep: Path) -> SearchFile | None:
        """Return the content of search.json; None if the sweep is no search."""
        try:
            return read(SearchFile, sweep / _NAME)
        except FileNotFoundError:
            return None

    @property
    def fixed(self) -> dict[str, str]:
        """In words what cannot change in a study."""
        facts = {"direction": self.direction, "metric": self.metric, "rungs": [*self.rungs]}
        return {key: f"{key}={value}" for key, value in facts.items()} | self.sweeps

    def write(self, sweep: Path) -> None:
        """Write search.json, with references to the secrets of the environment."""
        write_atomically(sweep / _NAME, reference(written(self)))

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return Optuna's distribution of each searched key."""
        from optuna.distributions import json_to_distribution

        return {key: json_to_distribution(text) for key, text in self.space.items()}

    def open(self) -> Study:
        """Return Optuna's study; one that is not there is a ConfigError."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            return optuna.load_study(study_name=self.study, storage=storage_of(self.storage))
        except KeyError as error:
            raise ConfigError(f"{self.storage}: it has no study {self.study}") from error


def storage_of(text: str) -> Any:
    """Return Optuna's storage: a URL as Optuna reads it, else the journal with this path."""
    if "://" in (text := expand(text)):
        return text
    from hpctrain.search.study_file import study_storage  # it imports Optuna

    return study_storage(Path(text))
