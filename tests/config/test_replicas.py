"""Gradient compression and local SGD refuse the settings that they cannot be combined with."""

import functools
from typing import Any

import pytest

from hpctrain.config.rules.combinations import parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.config.schema.key import keys

LOW, LOCAL = {"train.compression.kind": "powersgd"}, {"train.local_sgd.every": 8}


def problems(given: dict[str, Any]) -> list[str]:
    """Return the problems of a config on four ranks: of single values, or else of combinations."""
    config = Config()
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), config), name, value)
    rules = {key.name: key.rule for key in keys(Config)}
    wrong = [problem for key in given if (problem := rules[key].problem(key, given[key]))]
    return wrong or list(parallel_problems(config, Degrees.of(config.parallel, 4)))


@pytest.mark.parametrize("given", [LOW, LOCAL, LOCAL | {"train.accumulate": 4}])
def test_good(given: dict[str, Any]) -> None:
    assert problems(given) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (LOW | LOCAL, "kind=powersgd with train.local_sgd.every=8: replicas send no gradients"),
        (
            LOW | {"parallel.dp_shard": 2},
            "compression.kind=powersgd with parallel.dp_shard=2: it needs whole replicas (DDP)",
        ),
        (LOCAL | {"parallel.dp_shard": 4}, "train.local_sgd.every=8 with parallel.dp_shard=4: "),
        (LOW | {"parallel.fsdp.offload": True}, "kind=powersgd with parallel.fsdp.offload=true"),
        (LOCAL | {"parallel.sync": "every"}, "train.local_sgd.every=8 with parallel.sync=every"),
        (LOW | {"precision.reduce": "bf16"}, "kind=powersgd with precision.reduce=bf16: use null"),
        (LOCAL | {"precision.compute": "fp16"}, "every=8 with precision.compute=fp16"),
        ({"train.compression.kind": "top"}, "allowed are none, powersgd"),
        (LOW | {"train.compression.rank": 0}, "train.compression.rank=0: it must be at least"),
    ],
)
def test_bad(given: dict[str, Any], message: str) -> None:
    (problem,) = problems(given)
    assert message in problem
