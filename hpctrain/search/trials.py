"""A search as it is stored: search.json and Optuna's study. This is the one reader of both.

    search.json ── storage ── Found ── best
                               └── Trial: number, params, run, values by rung, state

sweeps/2026-01-31_12-00-00/
search.json    this file
bases.json     the composed config of each combination of choices (`trial_config`)
sweep.json     the runs of the trials, for `status`, `report`, `cancel` and so on
decision       the lock under which a worker decides what it does next
trials/7       the lock of trial 7: its owner holds it
workers/0/     a worker: worker.json, logs/
workers/array-0/   job.sh, tasks, batch/, job_id: the array of these workers

Optuna's study has the trials and two attributes: `folder`, that of the search, and `ended`, which
says why the search is over. All else is here.

A trial that is paused at a rung is RUNNING for Optuna, for which PRUNED is final. So a state is
read from three facts: Optuna's own state, the rungs that have a value, and whether a worker holds
the lock of the trial.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from hpctrain.base import gone
from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.lock import is_locked
from hpctrain.base.files.record import read, written
from hpctrain.base.secrets import expand, reference
from hpctrain.commands.select import SEARCH_FILE
from hpctrain.search.settings import SearchSettings

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_ENDED = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
# Attributes of a trial: the number of rungs that it shall reach. The others are in the texts below.
GOAL = "goal"


def code_of(sweep: Path) -> str:
    """Return the digest of the copy of the code that a search uses; "" if the sweep is none."""
    search = SearchFile.of(sweep)
    return (search and search.code) or ""


class SearchFile(SearchSettings, frozen=True, kw_only=True):
    """The content of search.json."""

    VERSION: ClassVar[int] = 1

    study: str
    storage: str  # the path of the journal
    uid: str = ""  # of the parent run in MLflow
    space: dict[str, str] = msgspec.field(default_factory=dict)  # Optuna's JSON of each key
    overrides: tuple[str, ...] = ()  # of every trial
    config_dir: str = ""  # that of the command
    output_dir: str = ""  # with the run directories
    code: str | None = None  # the digest of the code snapshot
    pythonpath: tuple[str, ...] = ()  # its folders

    @classmethod
    def of(cls, sweep: Path) -> SearchFile | None:
        """Return the content of search.json; None if the sweep is no search."""
        try:
            return read(SearchFile, sweep / SEARCH_FILE)
        except FileNotFoundError:
            return None

    def write(self, sweep: Path) -> None:
        """Write search.json, with references to the secrets of the environment."""
        write_atomically(sweep / SEARCH_FILE, reference(written(self)))

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return Optuna's distribution of each searched key."""
        from optuna.distributions import json_to_distribution

        return {key: json_to_distribution(text) for key, text in self.space.items()}

    def open(self, wait: Callable[[float], None] = time.sleep) -> Study:
        """Return Optuna's study, whose lock is waited for so; without one it is a ConfigError."""
        import optuna

        from hpctrain.search.study_file import study_storage  # it imports Optuna

        if "://" in self.storage:
            raise ConfigError(gone.sentence("hydra.sweeper.storage"))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = study_storage(Path(expand(self.storage)), wait)
        try:
            return optuna.load_study(study_name=self.study, storage=storage)
        except KeyError as error:
            raise ConfigError(f"{self.storage}: it has no study {self.study}") from error


@dataclass(frozen=True)
class Trial:
    """A trial as its study has it.

    `rung` is the number of rungs that have a value, and `goal` that of those it shall reach: a
    trial is paused when both are the same, and "promoted" while it waits for a worker to go on.
    `values` has the metric by the step of a rung.
    """

    number: int
    state: str  # waiting, training, paused, promoted; at its end pruned, failed, finished
    params: Mapping[str, Any]
    run: str  # the name of the run directory; "" before its config is frozen
    values: Mapping[int, float]
    rung: int
    goal: int
    reason: str  # why it was pruned or has failed

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.state in _ENDED.values()

    @property
    def value(self) -> float | None:
        """The value at the last rung that it has reached."""
        return self.values[max(self.values)] if self.values else None

    @property
    def step(self) -> int:
        """The step of the last rung that it has reached."""
        return max(self.values, default=0)


class FoundSearch(SearchFile, frozen=True, kw_only=True):
    """A search as it is now: what search.json says, and the trials of its study."""

    ended: str = ""  # why the search is over; "" while it is not
    trials: tuple[Trial, ...] = ()

    @classmethod
    def of(cls, sweep: Path, study: Study | None = None) -> FoundSearch:
        """Return the search of a sweep's folder; a StorageError if it is no search.

        An open study saves time. Trials that others have enqueued in it do not count.
        """
        if (file := SearchFile.of(sweep)) is None:
            raise StorageError(f"{sweep}: this folder is no search (search.json is missing)")
        study = study or file.open()
        trials = (
            _trial(each, file.rungs, owner_lock(sweep, each.number))
            for each in study.get_trials(deepcopy=False)
            if each.state.name != "WAITING"
        )
        ended, known = study.user_attrs.get("ended", ""), msgspec.structs.asdict(file)
        return cls(**known, ended=ended, trials=tuple(trials))

    @property
    def best(self) -> Trial | None:
        """The best of the trials that have finished; None before there is one."""
        return min(self.at("finished"), key=self.rank, default=None)

    def rank(self, trial: Trial, step: int | None = None) -> tuple[float, int]:
        """Return by what trials are sorted at a rung, the best first; None: at its last one."""
        value = trial.values[trial.step if step is None else step]
        sign = -1 if self.direction == "maximize" else 1
        return (sign * value if math.isfinite(value) else math.inf), trial.number

    def at(self, *states: str) -> list[Trial]:
        """Return the trials in one of these states."""
        return [trial for trial in self.trials if trial.state in states]

    @property
    def left(self) -> list[Trial]:
        """The trials with which a worker is to go on, as far as that is decided."""
        return self.at("promoted", "waiting")

    @property
    def new(self) -> int:
        """How many trials are still to be begun."""
        return max(0, self.n_trials - len(self.trials))


def owner_lock(sweep: Path, number: int) -> Path:
    """Return the file whose lock the owner of a trial holds."""
    return sweep / "trials" / str(number)


def _trial(found: FrozenTrial, rungs: Sequence[int], lock: Path) -> Trial:
    attributes, values = found.user_attrs, found.intermediate_values
    goal, rung = attributes.get(GOAL, 1), sum(step <= max(values, default=-1) for step in rungs)
    state = _ENDED.get(found.state.name)
    if state is None and is_locked(lock):
        state = "training"
    elif state is None:
        # At the last rung there is only its end to be told, which its owner has not done.
        paused = goal <= rung < len(rungs)
        state = "paused" if paused else "promoted" if rung else "waiting"
    return Trial(
        number=found.number,
        state=state,
        params=found.params,
        run=attributes.get("run", ""),
        values=values,
        rung=rung,
        goal=goal,
        reason=attributes.get("reason", ""),
    )
