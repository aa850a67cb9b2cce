"""The search space: from sweeps in Hydra's syntax to Optuna's distributions, and to new trials.

optimizer.lr=tag(log,interval(1e-4,1e-1))    a float, by its logarithm
train.accumulate=int(interval(1,4))          a whole number
model.hidden=choice([64],[256,256])          one of several texts
seed=range(0,5)                              a grid of numbers
"""

from __future__ import annotations

import copy
import pkgutil
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from hpctrain.base.errors import ConfigError
from hpctrain.search.trials import FoundSearch

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

# A worker reads these when it starts, and trains all its trials with them.
_OF_WORKERS = ("launch", "site", "network", "hydra", "output_dir")
_IN_WORKERS = (
    "train.deterministic",  # environment variables of torch
    "parallel.device",
)
_TRIES = 50  # to find values that no trial has: two trials cannot have one run directory
_LENGTHS = ("train.max_steps", "train.max_epochs")


def check_keys(keys: Iterable[str], rungs: bool) -> None:
    """Raise a ConfigError for a key that a search cannot vary; with `rungs`, nor a run's length."""
    for key in keys:
        plain = key.lstrip("+~")
        if plain.split(".")[0].split("/")[0] in _OF_WORKERS or plain in _IN_WORKERS:
            raise ConfigError(
                f"{key}: a search cannot vary it, because a worker has it from its start and "
                f"trains one trial after another ({', '.join((*_OF_WORKERS, *_IN_WORKERS))}); give "
                "one value, or submit a sweep without hydra/sweeper=optuna"
            )
        if rungs and plain in _LENGTHS:
            raise ConfigError(
                f"{key}: a search with hydra.sweeper.rungs cannot vary it: the trials of a rung "
                "would be compared at different places of their schedules; give one value"
            )


def distribution(override: Override) -> BaseDistribution:
    """Return Optuna's distribution of a searched key; a sweep that has none is a ConfigError."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep: Any = override.value()
    try:
        if isinstance(sweep, IntervalSweep):
            low: Any = sweep.start
            high: Any = sweep.end
            log = "log" in sweep.tags
            if isinstance(low, int) and isinstance(high, int):  # int(interval(1,10))
                return IntDistribution(low, high, log=log)
            return FloatDistribution(low, high, log=log)
        texts = list(override.sweep_string_iterator())
        if not isinstance(sweep, RangeSweep):
            return CategoricalDistribution(sorted(set(texts)))  # the order must not matter
        if all(text.lstrip("-").isdigit() for text in texts):
            whole = [int(text) for text in texts]
            return IntDistribution(min(whole), max(whole), step=abs(int(sweep.step)))
        numbers = [float(text) for text in texts]
        return FloatDistribution(min(numbers), max(numbers), step=abs(float(sweep.step)))
    except (ValueError, HydraException) as error:
        raise ConfigError(f"{override.input_line}: {error}") from error


def sampler(given: Mapping[str, Any], trials: int = 0) -> BaseSampler:
    """Return the sampler that `hydra.sweeper.sampler` describes, for the trial after so many."""
    from optuna.exceptions import ExperimentalWarning

    arguments = {**given}
    target = str(arguments.pop("_target_"))
    try:
        # The same random numbers must not come again, except where they only put a grid in order.
        # With a sum of both, the search of the next seed would be this one without its first trial.
        if arguments.get("seed") is not None and not target.endswith("GridSampler"):
            mixed = np.random.SeedSequence([arguments["seed"], trials])
            arguments["seed"] = int(mixed.generate_state(1)[0])
        with warnings.catch_warnings(category=ExperimentalWarning, action="ignore"):
            found: BaseSampler = pkgutil.resolve_name(target)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        what = ", ".join(f"{key}={value}" for key, value in given.items())
        raise ConfigError(f"hydra.sweeper.sampler.{what}: {error}") from error
    return found


def ask(study: Study, found: FoundSearch) -> int:
    """Store a new trial with all its values, in one record, and return its number.

    The sampler learns from the paused trials, too. For Optuna they are RUNNING, of which it does
    not read the values, so the values are proposed by a copy of the study in which they are PRUNED:
    samplers then compare trials at the last rung of each.
    """
    import optuna
    from optuna.trial import TrialState

    known = optuna.create_study(
        direction=found.direction, sampler=sampler(found.sampler, len(found.trials))
    )
    stored = study.get_trials(deepcopy=False)
    for trial in found.trials:
        each = copy.copy(stored[trial.number])
        if trial.values and not trial.ended:
            each.state, each.datetime_complete = TrialState.PRUNED, each.datetime_start
        elif trial.state == "pruned" and not trial.values:
            each.state = TrialState.FAIL  # else it is taken for the worst of all
        known.add_trial(each)
    for _ in range(_TRIES):
        if known.ask(found.distributions()).params not in [each.params for each in found.trials]:
            break
    study.add_trial(known.get_trials()[-1])
    return study.get_trials(deepcopy=False)[-1].number
