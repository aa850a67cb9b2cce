"""The settings of a search, `hydra.sweeper.*`, checked: conf/hydra/sweeper/optuna.yaml has them."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import msgspec
from omegaconf import OmegaConf

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.record import Count, Record
from hpctrain.base.names.metric_names import better
from hpctrain.config.rules.batch_sizes import ramp_of
from hpctrain.config.schema import DataConfig, TrainConfig
from hpctrain.runs.data_digest import most_samples

log = logging.getLogger(__name__)
_DIRECTIONS = "minimize", "maximize"
# If these are searched, the trials have epochs of different numbers of steps.
_VARY_EPOCHS = "data", "train.global_batch_size", "train.batch_size_ramp"


class SearchSettings(Record, frozen=True, kw_only=True):
    """What `hydra.sweeper` says; search.json has it.

    `rungs` are global steps, the last one that of the end of a run, or 0 if it is not known before.
    `etas` has a number for each rung but the last.
    """

    direction: Literal["minimize", "maximize"]
    metric: str
    n_trials: Count
    n_jobs: Count = 1
    rungs: tuple[Count, ...] = (0,)
    etas: tuple[float, ...] = ()
    sampler: dict[str, Any] = msgspec.field(default_factory=dict)
    sweeps: dict[str, str] = msgspec.field(default_factory=dict)  # the words of each searched key

    @property
    def fixed(self) -> dict[str, str]:
        """In words what cannot change in a study, by its key."""
        facts = {"direction": self.direction, "metric": self.metric, "rungs": [*self.rungs]}
        return {key: f"{key}={value}" for key, value in facts.items()} | self.sweeps

    @classmethod
    def checked(
        cls, given: Mapping[str, Any], metric: str, max_steps: int | None
    ) -> SearchSettings:
        """Return the settings; a wrong one is a ConfigError.

        `metric` and `max_steps` are those of the config.
        """
        given = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in given.items()
        }
        eta = given.get("eta", 2)
        fits_eta = type(eta) in (int, float) and 1 <= eta < math.inf
        for key, fits, allowed in (
            ("direction", given["direction"] in _DIRECTIONS, f"minimize or maximize {metric}?"),
            ("n_trials", _is_count(given["n_trials"]), "it must be at least 1"),
            ("n_jobs", _is_count(given["n_jobs"]), "it must be at least 1"),
            ("eta", fits_eta, "it must be a number from 1 on"),
        ):
            if not fits:
                _refuse(key, given, allowed)
        known = better(metric)
        if known and (known == "lower") != (given["direction"] == "minimize"):
            log.warning(
                "hydra.sweeper.direction=%s, but by its name %s has better values where it is %s",
                *(given["direction"], metric, known),
            )
        rungs = _rungs(given, max_steps)
        return cls(
            **{key: given[key] for key in ("direction", "n_trials", "n_jobs", "sampler")},
            metric=metric,
            rungs=rungs,
            etas=(eta,) * (len(rungs) - 1),
        )

    def check_trial(self, data: DataConfig, train: TrainConfig) -> None:
        """Raise a ConfigError if a trial with these sections cannot have one of the rungs."""
        varies = any(key.startswith(_VARY_EPOCHS) for key in self.sweeps)
        end = math.inf if varies else _end(data, train)
        if beyond := [step for step in self.rungs[:-1] if step >= end]:
            raise ConfigError(
                f"hydra.sweeper.rungs={[*self.rungs]}: with train.max_epochs="
                f"{train.max_epochs} a run ends at step {end:.0f}, so no trial would be "
                f"compared at {beyond[0]}; give smaller rungs, or more epochs (null: no limit)"
            )


def _end(data: DataConfig, train: TrainConfig) -> float:
    """Return the step at which `train.max_epochs` ends a run at the latest, if it is known."""
    ramp = ramp_of(train)
    if train.max_epochs is None or (samples := most_samples(data)) is None:
        return math.inf
    # With the smaller batches of a ramp, an epoch may have a part of what the last step leaves out.
    leaves_out = data.tail == "drop" and not ramp.stages
    steps = samples // ramp.final if leaves_out else -(-samples // ramp.final)
    return ramp.steps(train.max_epochs * steps * ramp.final)


def _rungs(given: Mapping[str, Any], max_steps: int | None) -> tuple[int, ...]:
    if given.get("rungs") is None:
        return (max_steps or 0,)
    key = "rungs"
    if max_steps is None:
        _refuse(key, given, "rungs are steps before the end of a run: give train.max_steps, too")
    steps = given[key] if given[key] and isinstance(given[key], list) else [given[key]]
    for before, step in itertools.pairwise([0, *steps]):
        if not _is_count(step):
            _refuse(key, given, f"{step} is no global step, which is a whole number from 1 on")
        if step <= before:
            _refuse(key, given, f"rungs must increase, but {step} follows {before}")
        if step > max_steps:
            _refuse(key, given, f"{step} is beyond train.max_steps={max_steps}")
    return (*dict.fromkeys((*steps, max_steps)),)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _refuse(key: str, given: Mapping[str, Any], why: str) -> NoReturn:
    raise ConfigError(f"hydra.sweeper.{key}={given[key]}: {why}")
