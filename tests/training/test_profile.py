"""train.profile: which ranges are allowed, and the trace that a run records."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.schema import TrainConfig
from hpctrain.config.schema.key import keys
from tests.conftest import Completed, runs


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        (None, ""),
        ("10-15", ""),
        ("15", "a range of steps, such as 10-15"),
        ("1-5", "begin at step 2 or later"),
        ("9-5", "not end before that"),
        ("2-2000", "at most 100 steps"),
    ],
)
def test_the_range_is_checked(value: str | None, wrong: str) -> None:
    (rule,) = (key.rule for key in keys(TrainConfig) if key.name == "profile")
    problem = rule.problem("train.profile", value)
    assert (wrong in problem) if wrong else not problem


def test_a_run_records_its_steps(train: Callable[..., Completed], tmp_path: Path) -> None:
    train("train.max_epochs=1", "train.profile=4-6", "tracking.enabled=false")
    (run,) = runs(tmp_path / "runs")
    with gzip.open(run / "profile" / "steps-4-6.rank0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::addmm") % 3 == 0  # as often in each step
    assert "aten::addmm" in names
