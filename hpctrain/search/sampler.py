"""New trials: Optuna's sampler proposes their values from all that the search has found so far."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.errors import ConfigError
from hpctrain.search.trials import Found

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler

_TRIES = 50  # to find values that no trial has: two trials cannot have one run directory


def sampler(given: Mapping[str, Any], trials: int = 0) -> BaseSampler:
    """Return the sampler that `hydra.sweeper.sampler` describes, for the trial after so many."""
    arguments = {str(key): value for key, value in given.items()}
    target = str(arguments.pop("_target_"))
    # The same random numbers must not come again, except where they only put a grid in order.
    if arguments.get("seed") is not None and not target.endswith("GridSampler"):
        arguments["seed"] += trials
    try:
        found: BaseSampler = pkgutil.resolve_name(target)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"hydra.sweeper.sampler._target_={target}: {error}") from error
    return found


def ask(study: Study, found: Found) -> int:
    """Store a new trial with all its values, in one record, and return its number.

    The sampler learns from the paused trials, too. For Optuna they are RUNNING, of which it does
    not read the values, so the values are proposed by a copy of the study in which they are PRUNED:
    samplers then compare trials at the last rung of each.
    """
    import optuna

    known = optuna.create_study(
        direction=found.direction, sampler=sampler(found.sampler, len(found.trials))
    )
    stored = study.get_trials(deepcopy=False)
    for trial in found.trials:
        each = copy.copy(stored[trial.number])
        if trial.values and not trial.ended:
            each.state, each.datetime_complete = optuna.trial.TrialState.PRUNED, each.datetime_start
        known.add_trial(each)
    for _ in range(_TRIES):
        if known.ask(found.distributions()).params not in [each.params for each in found.trials]:
            break
    study.add_trial(known.get_trials()[-1])
    return study.get_trials(deepcopy=False)[-1].number
