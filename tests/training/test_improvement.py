"""Early stopping and the best checkpoint: when a value is better, and what a run makes of it."""

import math
from typing import Any

import pytest

from hpctrain.engine.parts.improvement import Best, Improvement, Patience


def judged(values: list[float], **options: Any) -> tuple[Patience, list[bool]]:
    follows = Patience("val/loss", patience=2, **options)
    return follows, [follows.judge({"val/loss": v}, i) for i, v in enumerate(values)]


def test_patience_counts_values_in_a_row_without_a_better_one() -> None:
    follows, better = judged([3, 2, 2.5, 1, 1])
    assert better == [True, True, False, True, False]
    assert (follows.value, follows.step, follows.since, follows.is_over) == (1, 3, 1, False)
    follows.judge({"train/loss": 0.0}, 5)
    assert follows.since == 1, "another metric counts"
    follows.judge({"val/loss": 1.5}, 6)
    assert follows.is_over
    assert "val/loss was best at step 3 (1)" in follows.over


def test_a_gain_must_be_larger_than_min_delta_and_nan_is_none() -> None:
    assert judged([3, 2.9, 2.4], min_delta=0.5)[1] == [True, False, True]
    follows, better = judged([math.nan, math.nan])
    assert better == [False, False]
    assert follows.is_over
    assert "never finite" in follows.over


def test_the_mode_follows_from_the_name() -> None:
    up = Improvement("val/accuracy")
    assert [up.judge({"val/accuracy": v}, 0) for v in (0.5, 0.6, 0.55)] == [True, True, False]
    assert not up.is_over, "without patience nothing ends"
    up.load_state_dict({})
    assert up.value == 0.6, "a checkpoint of a run without early stopping has no state"


def test_the_best_value_is_recorded_when_its_checkpoint_is_safe() -> None:
    said: list[dict[str, Any]] = []
    best = Best("val/loss", said.append)
    best.judge({"val/loss": 2.0}, 4)
    assert best.is_due(4)
    best.mark(3)
    assert said == []
    best.mark(4)
    best.mark(4)
    assert said == [{"metric": "val/loss", "value": 2.0, "step": 4}]
    assert not best.is_due(4)
    again = Best("val/loss", said.append, lambda step: step == 4)
    again.load_state_dict(best.state_dict())
    assert (again.value, len(said)) == (2.0, 2)
    other = Best("val/accuracy", said.append)
    other.load_state_dict(best.state_dict())
    assert (other.value, len(said)) == (None, 2), "the value of another metric is not the best"
    lost = Best("val/loss", said.append, lambda _: False)
    lost.load_state_dict(best.state_dict())
    assert (lost.value, len(said)) == (None, 2), "a checkpoint that is gone is not the best"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "train.early_stopping.metric=val/los",
            "train.early_stopping.metric=val/los: did you mean val/loss?",
        ),
        ("checkpoint.best=perf/samples_per_s", "checkpoint.best=perf/samples_per_s: it must be"),
        (
            "checkpoint.best=val/width task._target_=hpctrain.tasks.Mine",
            "checkpoint.best=val/width: its name does not tell which values are better: it "
            "needs a word such as loss",
        ),
        (
            "checkpoint.best=val/hard/los data.val_sets=[{name:hard,split:hard}]",
            "checkpoint.best=val/hard/los: did you mean val/hard/loss?",
        ),
        # With local SGD each replica has a norm of its own.
        ("checkpoint.best=train/grad_norm", "checkpoint.best=train/grad_norm: its name does not"),
        (
            "train.early_stopping.metric=val/loss data.val_split=null",
            "train.early_stopping.metric=val/loss: ",
        ),
    ],
)
def test_a_metric_that_no_run_has_is_refused(composer: Any, override: str, said: str) -> None:
    from hpctrain.config.rules.metrics import problems

    config = composer.typed(["experiment=digits", *override.split()])
    assert any(problem.startswith(said) for problem in problems(config)), [*problems(config)]
