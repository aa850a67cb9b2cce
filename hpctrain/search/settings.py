"""The settings of a search, `hydra.sweeper.*`, checked: conf/hydra/sweeper/optuna.yaml has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from omegaconf import OmegaConf

from hpctrain.config.rank_counts import size_problems
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

_DIRECTIONS = "minimize", "maximize"


@dataclass(frozen=True)
class Settings:
    """What `hydra.sweeper` says; `rungs`, `etas` and `widths` are complete (see `trials.Found`).

    `halves` says whether there are rungs before the last one.
    """

    direction: Literal["minimize", "maximize"]
    n_trials: int
    n_jobs: int
    metric: str
    rungs: tuple[int, ...]
    etas: tuple[float, ...]
    widths: tuple[int, ...]
    min_reports: int
    max_failure_rate: float
    sampler: Mapping[str, Any]
    storage: str | None
    study_name: str | None

    @property
    def halves(self) -> bool:  # noqa: D102
        return len(self.rungs) > 1

    @classmethod
    def of(
        cls, given: Mapping[str, Any], metric: str, max_steps: int | None, nodes: range
    ) -> Settings:
        """Return the settings; a wrong one is a ConfigError.

        `metric` and `max_steps` are those of the config, and `nodes` the numbers of nodes that a
        worker may have by `launch.nodes`.
        """
        given = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in given.items()
        }
        metric = given.get("metric") or metric
        if given["direction"] not in _DIRECTIONS:
            _refuse("direction", given, f"minimize or maximize {metric}?")
        for key in ("n_trials", "n_jobs"):
            if not _is_whole(given[key]) or given[key] < 1:
                _refuse(key, given, "it must be at least 1")
        rate = given["max_failure_rate"]
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            _refuse("max_failure_rate", given, "it must be a share of the trials, from 0 to 1")
        least = given.get("min_reports")
        if least is not None and (not _is_whole(least) or least < 1):
            _refuse("min_reports", given, "it must be a number of trials, at least 1, or null")
        rungs = _rungs(given, max_steps)
        return cls(
            direction=given["direction"],
            n_trials=given["n_trials"],
            n_jobs=given["n_jobs"],
            metric=metric,
            rungs=rungs,
            etas=_etas(given, len(rungs) - 1),
            widths=_widths(given, len(rungs), nodes),
            min_reports=least or 0,
            max_failure_rate=float(rate),
            sampler=given["sampler"],
            storage=given["storage"],
            study_name=given["study_name"],
        )

    def check_widths(self, config: Config) -> None:
        """Raise a ConfigError if the config of a trial cannot have one of the widths."""
        for nodes in dict.fromkeys(self.widths):
            ranks = nodes * config.launch.tasks_per_node
            for problem in size_problems(config, ranks):
                raise ConfigError(
                    f"hydra.sweeper.widths={[*self.widths]}: {nodes} nodes: {problem}"
                )


def _rungs(given: Mapping[str, Any], max_steps: int | None) -> tuple[int, ...]:
    rungs, first = given.get("rungs"), given.get("first_rung")
    if rungs is not None and first is not None:
        _refuse("rungs", given, "give it or hydra.sweeper.first_rung, not both")
    key = "rungs" if first is None else "first_rung"
    if rungs is None and first is None:
        return (max_steps or 0,)
    steps: Any = [first] if rungs is None else rungs
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
        _refuse(key, given, "it must be a list of global steps, such as [500,2000]")
    if wrong := [step for step in steps if not _is_whole(step) or step < 1]:
        _refuse(key, given, f"{wrong[0]} is no global step, which is a whole number from 1 on")
    if max_steps is None:
        _refuse(key, given, "rungs are steps before the end of a run: give train.max_steps, too")
    for before, after in itertools.pairwise(steps):
        if after <= before:
            _refuse(key, given, f"rungs must increase, but {after} follows {before}")
    if steps[-1] > max_steps:
        _refuse(key, given, f"{steps[-1]} is beyond train.max_steps={max_steps}")
    if first is not None:
        etas, steps = _listed(given), [first]
        if min(etas) <= 1:
            _refuse("eta", given, "with hydra.sweeper.first_rung it must be more than 1")
        exact, number = float(first), 0
        while (exact := exact * etas[min(number, len(etas) - 1)]) < max_steps - 0.5:
            steps.append(round(exact))
            number += 1
    return (*steps, *([max_steps] if steps[-1] < max_steps else []))


def _listed(given: Mapping[str, Any]) -> list[float]:
    eta = given.get("eta", 3)
    etas = [*eta] if isinstance(eta, Sequence) and not isinstance(eta, str) else [eta]
    for each in etas or [None]:
        number = isinstance(each, int | float) and not isinstance(each, bool)
        if not number or not 1 <= each < math.inf:
            _refuse("eta", given, "it must be a number from 1 on, or a list with one for each rung")
    return [float(each) for each in etas]


def _etas(given: Mapping[str, Any], count: int) -> tuple[float, ...]:
    etas = _listed(given)
    if len(etas) == 1:
        etas *= count
    if len(etas) != count:
        _refuse(
            "eta", given, f"it needs one number, or {count}: one for each rung but the last one"
        )
    return tuple(etas)


def _widths(given: Mapping[str, Any], count: int, nodes: range) -> tuple[int, ...]:
    widths = given.get("widths")
    if widths is None:
        return (nodes[0],) * count
    if not isinstance(widths, Sequence) or isinstance(widths, str) or len(widths) != count:
        _refuse("widths", given, f"it must be a list of {count} numbers: nodes for each rung")
    if wrong := [width for width in widths if not _is_whole(width) or width < 1]:
        _refuse("widths", given, f"{wrong[0]} is no number of nodes, which is at least 1")
    if len(nodes) > 1:
        _refuse("widths", given, "launch.nodes must be one number then, and no range")
    return tuple(widths)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(key: str, given: Mapping[str, Any], why: str) -> NoReturn:
    raise ConfigError(f"hydra.sweeper.{key}={given[key]}: {why}")
