"""A batch or a stage of a ramp that the ranks cannot divide is refused before it is queued."""

from typing import Any

import pytest

from hpctrain.config.job_request import size_problems
from hpctrain.config.schema import Config
from hpctrain.config.schema.key import keys


def stage(size: int, **length: int) -> dict[str, int]:
    return {"global_batch_size": size, **(length or {"steps": 2})}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        (
            {"parallel.pp": 2, "parallel.dp_replicate": 2, "train.accumulate": 4},
            "train.batch_size_ramp[1].global_batch_size=20 is not divisible by dp 2 x "
            "train.accumulate 4 = 8: use 16 or 24",
        ),
        (
            {"train.micro_batch_size": "8"},
            "train.batch_size_ramp[1].global_batch_size=20 is not divisible by dp 4 x "
            "train.micro_batch_size 8 = 32: use 32",
        ),
        (
            {"parallel.pp": 4, "parallel.dp_replicate": 1, "train.micro_batch_size": "4"},
            "parallel.pipeline.schedule=1f1b with parallel.pp=4 and "
            "train.batch_size_ramp[0].global_batch_size=8: 2 micro-batches are fewer than the 4 "
            "ranks of the pipeline; use train.micro_batch_size=2",
        ),
        (
            {"train.global_batch_size": 20},
            "train.batch_size_ramp[1].global_batch_size=20 with train.global_batch_size=20: the "
            "batches of a ramp must grow",
        ),
        (
            {"train.micro_batch_size": "auto"},
            "train.micro_batch_size=auto with train.batch_size_ramp=[{'global_batch_size': 8, "
            "'steps': 2}, {'global_batch_size': 20, 'steps': 2}]: give a number",
        ),
    ],
)
def test_each_stage_must_be_divisible(given: dict[str, Any], said: str) -> None:
    config = Config(model={"_target_": "own.Net"})
    config.train.batch_size_ramp = [stage(8), stage(20)]
    for key, value in given.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    found = [*size_problems(config, 4)]
    assert said in found if said else not found, found


@pytest.mark.parametrize(
    ("one", "fits"),
    [
        (stage(8, samples=100), True),
        ({"global_batch_size": 8}, False),
        (stage(8, steps=2, samples=16), False),
        (stage(8, step=2), False),
        (stage(0), False),
        ({"global_batch_size": "8", "steps": 2}, False),
        (stage(True), False),
    ],
)
def test_a_stage_has_a_size_and_a_length(one: dict[str, Any], fits: bool) -> None:
    (key,) = (key for key in keys(Config) if key.name == "train.batch_size_ramp")
    problem = key.rule.problem(key.name, [stage(4), one])
    assert problem == "" if fits else f"{one} is no stage: it must have global_b" in problem
