"""The rule of promotion: what a worker does next, from what the study has. It writes nothing.

    promote a paused trial ── else heal one without an owner ── else ask a new one
    └── else wait while others may give work ── else end

Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
MLSys 2020, https://arxiv.org/abs/1810.05934): a trial is promoted as soon as it is in the best
1/eta of those that have reported at its rung. Nobody waits for a rung to be full.

At the end the paper's rule may leave the last rungs empty: 24 trials with eta=3 are 8, 2 and then
none. So when nothing is left to do and no trial has finished, the best trial of the highest rung
goes on, until one has.
"""

import math
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from hpctrain.search.trials import FoundSearch, Trial


class Action(Enum):
    """What a worker does next."""

    TAKE = "train this trial up to the rung `goal`"
    ASK = "begin a new trial"
    WAIT = "look again later"
    END = "end the search"


class Choice(NamedTuple):
    """An action, with the trial and the number of the rung, from 1 on, that it shall reach."""

    action: Action
    trial: Trial | None = None
    goal: int = 1


def choose(found: FoundSearch) -> Choice:
    """Return what a worker that trains nothing now does next."""
    if found.ended:
        return Choice(Action.END)
    for trial in _promotable(found):
        return Choice(Action.TAKE, trial, trial.rung + 1)
    for trial in found.left:
        return Choice(Action.TAKE, trial, trial.goal)
    if found.new:
        return Choice(Action.ASK)
    # A trial that reports at a rung may send itself, or another one, to a later one.
    if found.at("training"):
        return Choice(Action.WAIT)
    paused = [trial for trial in found.at("paused") if _is_finite(trial)]
    if paused and not found.at("finished"):
        trial = min(paused, key=lambda each: (-each.rung, found.rank(each)))
        return Choice(Action.TAKE, trial, trial.rung + 1)
    return Choice(Action.END)


def wanted(found: FoundSearch) -> int:
    """Return how many workers have something to do now."""
    return min(len(found.left) + found.new, found.n_jobs)


def _promotable(found: FoundSearch) -> Iterator[Trial]:
    """Yield the paused trials in the best 1/eta of their rung, those of the highest rung first."""
    for number in range(len(found.rungs) - 1, 0, -1):
        step, eta = found.rungs[number - 1], found.etas[number - 1]
        reported = [trial for trial in found.trials if step in trial.values]
        reported.sort(key=lambda trial, step=step: found.rank(trial, step))  # type: ignore[misc]
        for trial in reported[: math.floor(len(reported) / eta + 1e-9)]:
            if trial.state == "paused" and trial.rung == number and _is_finite(trial):
                yield trial


def _is_finite(trial: Trial) -> bool:
    return trial.value is not None and math.isfinite(trial.value)
