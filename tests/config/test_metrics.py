"""The main metric: which names a run can have, and when a wrong one is found."""

import pytest

from hpctrain.base.names.metric_names import better
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules.metrics import RequestedMetric, problems
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

LOGGED = ["perf/samples_per_s", "train/loss", "train/mse", "train/lr"]


def config(composer: Composer, *overrides: str) -> Config:
    return composer.typed(["experiment=digits", "task._target_=hpctrain.tasks.Mine", *overrides])


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        (["metric=val/mse"], "val/mse"),
        (["metric=train/mse"], "train/mse"),
        # The default need not be there, and these do not depend on the task.
        ([], ""),
        (["metric=train/grad_norm"], ""),
        (["metric=perf/samples_per_s"], ""),
        # The config check knows the names of our tasks.
        (["task._target_=hpctrain.tasks.Classification", "metric=val/loss"], ""),
    ],
)
def test_what_is_left_for_the_run_to_show(
    composer: Composer, overrides: list[str], asked: str
) -> None:
    made = config(composer, *overrides)
    assert list(problems(made)) == []
    assert RequestedMetric.of(made) == ([RequestedMetric(asked)] if asked else [])


def test_the_speed_has_the_same_names_with_every_task(composer: Composer) -> None:
    (said,) = problems(config(composer, "metric=perf/samples_per"))
    assert said.startswith("metric=perf/samples_per: did you mean perf/samples_per_s?")


def test_a_name_that_training_lacks_is_worth_an_evaluation_at_once() -> None:
    assert RequestedMetric("val/f1").is_doubtful(LOGGED)
    assert not RequestedMetric("val/mse").is_doubtful(LOGGED)
    assert not RequestedMetric("val/f1").is_doubtful([])  # nothing is known yet
    assert not RequestedMetric("val/f1").is_doubtful([*LOGGED, "val/f1"])
    assert not RequestedMetric("train/f1").is_doubtful(LOGGED)
    assert not RequestedMetric().is_doubtful(LOGGED)


def test_a_wrong_name_is_refused_once_those_of_its_group_are_known() -> None:
    for fine in ("val/nope", "train/mse", ""):
        RequestedMetric(fine).check(LOGGED)
    with pytest.raises(ConfigError, match=r"metric=train/ms: did you mean train/mse[?] this run"):
        RequestedMetric("train/ms").check(LOGGED)
    with pytest.raises(ConfigError, match=r"this run produces perf/.* val/loss, val/mse$"):
        RequestedMetric("val/nope").check([*LOGGED, "val/loss", "val/mse"])


def test_the_name_of_a_metric_tells_which_values_are_better() -> None:
    lower = ("val/loss", "train/bits_per_byte", "val/perplexity", "val/mse", "val/word_error")
    higher = ("val/accuracy", "val/top1_acc", "val/F1", "perf/samples_per_s")
    assert [better(name) for name in lower] == ["lower"] * len(lower)
    assert [better(name) for name in higher] == ["higher"] * len(higher)
    assert better("val/width") is None
