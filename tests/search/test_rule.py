"""Tests of the rule of promotion, on searches that are made up."""

import dataclasses
import math

from msgspec.structs import replace

from hpctrain.search.rule import Action, choose
from hpctrain.search.trials import FoundSearch, Trial


def trial(number: int, state: str, *values: float, goal: int = 0) -> Trial:
    reached = dict(zip((1, 3, 9), values, strict=False))
    goal = goal or max(1, len(values))
    return Trial(number, state, {}, f"run-{number}", reached, len(values), goal, "")


def search(*trials: Trial, n_trials: int = 0) -> FoundSearch:
    return FoundSearch(
        study="digits",
        storage="",
        direction="minimize",
        metric="val/loss",
        n_trials=n_trials or len(trials),
        rungs=(1, 3, 9),
        etas=(3.0, 3.0),
        trials=trials,
    )


def paused(*values: float) -> list[Trial]:
    return [trial(number, "paused", value) for number, value in enumerate(values)]


def test_a_trial_is_promoted_as_soon_as_it_is_in_the_best_third() -> None:
    assert choose(search(*paused(0.3, 0.2), n_trials=9)).action is Action.ASK
    choice = choose(search(*paused(0.3, 0.2, 0.1), n_trials=9))
    assert choice.trial is not None
    assert (choice.action, choice.trial.number, choice.goal) == (Action.TAKE, 2, 2)
    # Who has gone on, or has ended, still counts in its rung.
    for state in ("training", "promoted", "finished", "failed", "pruned"):
        best = trial(2, state, 0.1, goal=2)
        choice = choose(search(*paused(0.3, 0.2), best, n_trials=9))
        assert choice.trial in (None, best)
    # Later a better one may have come: the second of six is promoted, too.
    six = search(trial(0, "training", 0.1, goal=2), *paused(9, 0.3, 0.2, 0.4, 0.5, 0.6)[1:])
    choice = choose(six)
    assert choice.trial is not None
    assert choice.trial.number == 2


def test_the_highest_rung_comes_first_and_a_number_that_is_not_finite_never() -> None:
    third = [trial(n, "paused", 0.1, value) for n, value in enumerate((0.3, 0.2, 0.1))]
    choice = choose(search(*third, *paused(*[0.05] * 9)[3:], n_trials=99))
    assert choice.trial is not None
    assert (choice.trial.number, choice.goal) == (2, 3)
    lost = search(*paused(math.nan, math.inf, math.nan))
    assert choose(lost).action is Action.END


def test_noise_is_met_with_a_larger_share_and_a_least_number_of_reports() -> None:
    three = search(*paused(0.3, 0.2, 0.1), n_trials=9)
    lenient = replace(three, etas=(1.5, 3.0))
    taken = []
    while (choice := choose(lenient)).action is Action.TAKE:
        assert choice.trial is not None
        taken.append(choice.trial.number)
        gone = dataclasses.replace(choice.trial, state="training", goal=2)
        rest = [t for t in lenient.trials if t.number != gone.number]
        lenient = replace(lenient, trials=(*rest, gone))
    assert taken == [2, 1]
    everything = replace(three, etas=(1.0, 3.0))
    assert choose(everything).action is Action.TAKE


def test_who_has_nothing_to_do_heals_waits_or_ends_the_search() -> None:
    left = trial(3, "promoted", 0.1, goal=2)
    choice = choose(search(*paused(0.3, 0.2, 0.4), left, n_trials=9))
    assert choice.trial is not None
    assert (choice.trial.number, choice.goal) == (3, 2)
    others = search(*paused(0.3, 0.2), trial(2, "training"))
    assert choose(others).action is Action.WAIT
    ended = search(*paused(0.3, 0.2), trial(2, "finished", 0.1, 0.1, 0.1))
    assert choose(ended) == (Action.END, None, 1)
    assert choose(search(*paused(0.3, 0.2), trial(2, "pruned"))).action is not Action.END


def test_at_the_end_the_best_goes_on_until_one_has_finished() -> None:
    """24 trials with eta=3 are 8, 2 and then none."""
    two = [trial(n, "paused", 0.1, value) for n, value in enumerate((0.2, 0.3))]
    choice = choose(search(*two, trial(2, "paused", 0.5), trial(3, "failed")))
    assert choice.trial is not None
    assert (choice.trial.number, choice.goal) == (0, 3)
    failed = trial(0, "failed", 0.1, 0.2, goal=3)
    again = choose(search(failed, two[1], trial(2, "paused", 0.5)))
    assert again.trial is not None
    assert again.trial.number == 1
