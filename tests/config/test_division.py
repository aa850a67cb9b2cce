"""Degrees that do not divide a model or a sequence are refused before a job is queued."""

import functools
from typing import Any

import pytest

from hpctrain.config.rules.combinations import division_problems, parallel_problems
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config

MODEL = {"_target_": "hpctrain.models.Transformer", "vocab_size": 64, "dim": 64, "layers": 4}


OTHER = {"_target_": "hpctrain.models.MLP"}
PIPELINE = {"parallel__pp": 2, "train__accumulate": 4}


def problems(ranks: int, model: dict[str, Any] | None = None, **given: Any) -> list[str]:
    """Return what is wrong on so many ranks; a key is given as section__name."""
    config = Config(model=MODEL | (model or {"heads": 8, "kv_heads": 4}))
    for key, value in given.items():
        *path, name = key.split("__")
        setattr(functools.reduce(getattr, path, config), name, value)
    degrees = Degrees.of(config.parallel, ranks)
    return [*parallel_problems(config, degrees), *division_problems(config, degrees)]


def test_good() -> None:
    windows = {"data__windows__field": "text", "data__windows__length": 129}
    assert problems(4, parallel__tp=4, **windows) == []
    assert problems(8, parallel__tp=2, parallel__cp=2, **windows) == []
    stages = {"parallel__pp": 2, "parallel__pipeline__blocks": [1, 3], "train__accumulate": 4}
    assert problems(4, **stages) == []
    assert problems(4, OTHER, parallel__tp=2, parallel__plan={"1": "colwise"}) == []
    assert problems(4, {"heads": 4, "experts": 8, "tied": True}, parallel__ep=2) == []


def test_degrees_fill_what_is_left() -> None:
    config = Config()
    config.parallel.dp_replicate, config.parallel.tp, config.parallel.pp = 2, -1, 2
    assert str(Degrees.of(config.parallel, 16)) == (
        "dp_replicate 2 x dp_shard 1 x cp 1 x tp 4 x pp 2 = 16"
    )


@pytest.mark.parametrize(
    ("ranks", "model", "given", "message"),
    [
        (8, None, {"parallel__tp": 8}, "parallel.tp=8 does not divide model.kv_heads=4: use 4"),
        (3, {"heads": 8}, {"parallel__tp": 3}, "tp=3 does not divide model.heads=8: use 2 or 4"),
        (
            2,
            {"heads": 8, "hidden": 99},
            {"parallel__tp": 2},
            "parallel.tp=2 does not divide model.hidden=99: use 1",
        ),
        (
            2,
            None,
            {"parallel__tp": 2, "data__windows__field": "text", "data__windows__length": 128},
            "data.windows.length=128: parallel.tp=2 does not divide the 127 positions of a sample: "
            "use 127 or 129, or parallel.sequence_parallel=false",
        ),
        (
            4,
            None,
            {
                "parallel__tp": 2,
                "parallel__cp": 2,
                "data__windows__field": "text",
                "data__windows__length": 127,
            },
            "length=127: parallel.cp=2 with parallel.tp=2 needs 4 equal parts of the 126 positions "
            "of a sample: use 125 or 129",
        ),
        (
            2,
            None,
            {"parallel__tp": 2, "parallel__device": "cpu", "train__compile": "blocks"},
            "train.compile=blocks with parallel.device=cpu and parallel.tp=2: torch fails; use off",
        ),
        (
            8,
            None,
            {"parallel__pp": 8, "train__accumulate": 8},
            "makes 8 stages, but model.layers=4 gives 4 blocks, and each stage needs one",
        ),
        (
            2,
            None,
            PIPELINE | {"parallel__pipeline__blocks": [1, 2]},
            "blocks=[1, 2] has 3 blocks, but model.layers=4 gives 4 blocks, such as [2, 2]",
        ),
        (2, {"heads": 4, "tied": True}, PIPELINE, "Transformer and model.tied=true: the first"),
        (2, None, {"parallel__ep": 2}, "null: it has no experts; model.experts=8 gives it"),
        (
            2,
            {"heads": 4, "experts": 8},
            {"parallel__plan": {"head": "colwise"}},
            "model.experts=8: a model with experts divides itself",
        ),
        (2, OTHER, {"parallel__ep": 2}, "=hpctrain.models.MLP: it has no experts; use 1"),
        (2, OTHER, {"parallel__tp": 2}, "MLP and parallel.plan={}: it has no plan for tensor"),
        (
            2,
            OTHER,
            PIPELINE,
            "parallel.pp=2 with model._target_=hpctrain.models.MLP: it has no plan for pipeline",
        ),
        (
            2,
            None,
            {"parallel__tp": 2, "precision__compute": "fp8"},
            "fp8 with parallel.tp=2: use bf16",
        ),
        (
            4,
            None,
            {"parallel__tp": 2, "train__compression__kind": "powersgd"},
            "train.compression.kind=powersgd with parallel.tp=2: it needs whole replicas (DDP)",
        ),
    ],
)
def test_bad(ranks: int, model: dict[str, Any] | None, given: dict[str, Any], message: str) -> None:
    found = problems(ranks, model, **given)
    assert any(message in problem for problem in found), found


def test_the_styles_of_a_plan() -> None:
    from hpctrain.config.schema.key import keys

    rule = {key.name: key.rule for key in keys(Config)}["parallel.plan"]
    assert rule.problem("parallel.plan", {"a.*": "colwise"}) == ""
    assert "allowed are colwise, rowwise" in rule.problem("parallel.plan", {"a": "columns"})
