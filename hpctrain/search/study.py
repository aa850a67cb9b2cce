"""Optuna's study of a search: begun or found again, and asked for the next trial.

What the study holds besides the trials are its attributes: `uid`, `folder`, `rungs`, `eta`,
`widths`, `metric`, `keys`, `space`, and `ended` with the reason when the search is over.
"""

from __future__ import annotations

import pkgutil
import uuid
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ConfigError
from hpctrain.search.search_file import storage_of
from hpctrain.search.settings import Settings
from hpctrain.search.trials import Found
from hpctrain.secrets import mask

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

_TRIES = 50  # to find values that no trial has: two trials cannot have one run directory
_Space = Mapping[str, "BaseDistribution"]


def begin(settings: Settings, name: str, storage: str, space: Mapping[str, str]) -> Study:
    """Return the study, which is made if it is not there; `space` has the sweeps by their keys.

    A study that is there, but searches something else, is a ConfigError.
    """
    import optuna

    study = optuna.create_study(
        storage=storage_of(storage),
        study_name=name,
        direction=settings.direction,
        load_if_exists=True,
    )
    known = study.user_attrs
    asked: dict[str, Any] = {
        "direction": settings.direction,
        "metric": settings.metric,
        "rungs": [*settings.rungs],
        "space": dict(space),
    }
    found = {**known, "direction": study.direction.name.lower()}
    for key, value in asked.items():
        if key in found and found[key] != value:
            changed = _changes(found[key], value) if key == "space" else f"{key}: {found[key]}"
            raise ConfigError(
                f"hydra.sweeper.study_name={name}: this study has {mask(changed)}, and now "
                f"{_now(key, value)}is asked for: trials of both could not be compared. Take "
                "another hydra.sweeper.study_name, or null for one of its own"
            )
    facts = {**asked, "keys": [*space], "eta": [*settings.etas], "widths": [*settings.widths]}
    facts["uid"] = known.get("uid", uuid.uuid4().hex)
    for key, value in facts.items():
        if key != "direction" and known.get(key) != value:
            study.set_user_attr(key, value)
    return study


def _now(key: str, value: Any) -> str:
    return "another space " if key == "space" else f"{value} "


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    lines = [
        f"{before.get(key, f'no {key}')} (now {now.get(key, 'left out')})"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]
    return "; ".join(lines)


def sampler(given: Mapping[str, Any], trials: int) -> BaseSampler:
    """Return the sampler that `hydra.sweeper.sampler` describes, for the trial after so many."""
    from optuna.exceptions import ExperimentalWarning

    arguments = {str(key): value for key, value in given.items()}
    target = str(arguments.pop("_target_"))
    # The same random numbers must not come again, except where they only put a grid in order.
    if arguments.get("seed") is not None and not target.endswith("GridSampler"):
        arguments["seed"] += trials
    try:
        with warnings.catch_warnings(category=ExperimentalWarning, action="ignore"):
            found: BaseSampler = pkgutil.resolve_name(target)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"hydra.sweeper.sampler._target_={target}: {error}") from error
    return found


def ask(study: Study, space: _Space, found: Found, given: Mapping[str, Any]) -> Trial:
    """Return a new trial with all its values, which are stored together with it.

    The sampler learns from the paused trials, too. For Optuna they are RUNNING, of which it does
    not read the values, so the values are proposed by a copy of the study in which they are PRUNED:
    samplers then compare trials at the last rung of each.
    """
    asked = [trial for trial in found.trials if trial.asked]
    neutral, study.sampler = study.sampler, sampler(given, len(asked))
    if len(asked) == len(found.trials) and not _needs_study(given):  # none is enqueued
        study.enqueue_trial(_proposed(study, space, found))
    trial = study.ask(dict(space))
    study.sampler = neutral  # one of a grid notes each trial that somebody opens
    return trial


def _needs_study(given: Mapping[str, Any]) -> bool:
    """Whether the sampler notes in the study what it has proposed."""
    return str(given["_target_"]).endswith(("GridSampler", "BruteForceSampler"))


def _proposed(study: Study, space: _Space, found: Found) -> dict[str, Any]:
    import optuna
    from optuna.trial import TrialState, create_trial

    copy = optuna.create_study(direction=study.direction, sampler=study.sampler)
    for trial, stored in zip(found.trials, study.get_trials(deepcopy=False), strict=True):
        paused = bool(trial.values) and not trial.ended
        state = TrialState.PRUNED if paused else stored.state
        if state is TrialState.FAIL or stored.params.keys() != space.keys():
            continue
        copy.add_trial(
            create_trial(
                state=state,
                value=stored.value if state is TrialState.COMPLETE else None,
                params=stored.params,
                distributions=stored.distributions,
                intermediate_values=stored.intermediate_values,
            )
        )
    known = [trial.params for trial in found.trials]
    for _ in range(_TRIES):
        params = copy.ask(dict(space)).params
        if params not in known:
            break
    return params
