"""Tests of what `hydra.sweeper` may say."""

from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.search.settings import SearchSettings
from hpctrain.search.space import check_keys

GIVEN = {"direction": "minimize", "n_trials": 9, "n_jobs": 2, "sampler": {}, "study_name": None}


def settings(max_steps: int | None = 8000, **given: Any) -> SearchSettings:
    return SearchSettings.checked(GIVEN | given, "val/loss", max_steps)


@pytest.mark.parametrize(
    ("given", "rungs"),
    [
        ({}, (8000,)),
        ({"max_steps": None}, (0,)),
        ({"rungs": [500, 2000]}, (500, 2000, 8000)),
        ({"rungs": [500, 8000]}, (500, 8000)),
        ({"rungs": 500}, (500, 8000)),
    ],
)
def test_the_last_rung_is_the_end_of_a_run(given: dict[str, Any], rungs: tuple[int, ...]) -> None:
    found = settings(**given)
    assert found.rungs == rungs
    assert len(found.etas) == len(rungs) - 1


@pytest.mark.parametrize(
    ("metric", "direction", "told"),
    [
        ("val/loss", "minimize", False),
        ("val/loss", "maximize", True),
        ("val/accuracy", "minimize", True),
        ("val/width", "maximize", False),  # nobody knows
    ],
)
def test_the_wrong_direction_is_told(
    metric: str, direction: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    SearchSettings.checked(GIVEN | {"direction": direction}, metric, 8000)
    assert told is ("has better values where it is" in caplog.text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rungs": [500, 500]}, "rungs=[500, 500]: rungs must increase, but 500 follows 500"),
        ({"rungs": [500, 9000]}, "9000 is beyond train.max_steps=8000"),
        ({"rungs": [0.5, 2000]}, "0.5 is no global step"),
        ({"rungs": [0, 2000]}, "0 is no global step"),
        ({"rungs": []}, "rungs=[]: [] is no global step"),
        ({"rungs": [5], "max_steps": None}, "give train.max_steps, too"),
        ({"rungs": [5], "eta": 0.5}, "eta=0.5: it must be a number from 1 on"),
        ({"rungs": [5], "eta": [2, 3]}, "eta=[2, 3]: it must be a number from 1 on"),
        ({"rungs": [5], "eta": True}, "eta=True: it must be a number from 1 on"),
        ({"direction": None}, "direction=None: minimize or maximize val/loss?"),
        ({"n_jobs": 0}, "n_jobs=0: it must be at least 1"),
        ({"n_trials": 2.5}, "n_trials=2.5: it must be at least 1"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(**given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        *("launch.nodes", "site", "network.interface", "+site.qos", "train.deterministic"),
        "parallel.device",
    ],
)
def test_a_search_does_not_vary_what_a_worker_has_from_its_start(key: str) -> None:
    with pytest.raises(ConfigError, match="a worker has it from its start"):
        check_keys([key], rungs=False)
    check_keys(["optimizer.lr", "model", "train.max_steps"], rungs=False)
    with pytest.raises(ConfigError, match="different places of their schedules"):
        check_keys(["train.max_steps"], rungs=True)
