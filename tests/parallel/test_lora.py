"""Adapters (LoRA): the numbers of one process in every layout, checkpoints, and what is refused."""

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain import load_run
from hpctrain.config.rules.combinations import refused
from hpctrain.engine.checkpoint.tensor_reader import TensorReader
from hpctrain.engine.layers.lora import Adapted, add_adapters, freeze_base, is_adapter
from hpctrain.errors import ConfigError, StorageError
from hpctrain.models import Transformer
from hpctrain.runs.checkpoints.manifest import Manifest
from tests.bounds import EXACT, within
from tests.conftest import Completed, run_json, runs
from tests.parallel.parity import (
    BEFORE,
    Cell,
    Result,
    difference,
    either,
    finished,
    reference,
    rest_of,
    results,
    resumed,
    save,
    saved,
    train,
)
from tests.ranks import run_ranks
from tests.steps import config_with

BASE = "abc"  # the digest of the weights that the adapters belong to
Train = Callable[..., Completed]
LORA: dict[str, Any] = {
    "train.lora.match": ("*.query", "*.value", "*.out", "*.down"),
    "train.lora.rank": 4,
}
ZERO3: dict[str, Any] = {"parallel.dp_replicate": 1, "parallel.dp_shard": 2}
COVERING: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, ZERO3),
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2, "train.accumulate": 2}),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "cp": (2, {"parallel.cp": 2}),
    "zbv": (2, {"parallel.pp": 2, "train.accumulate": 4, "parallel.pipeline.schedule": "zbv"}),
    "whole sequence": (2, {"parallel.tp": 2, "parallel.sequence_parallel": False}),
    "checkpointing": (2, ZERO3 | {"train.activation_checkpointing": "full"}),
    "offload": (2, ZERO3 | {"parallel.fsdp.offload": True}),
    "tp, zero3": (4, {"parallel.tp": 2, "parallel.dp_replicate": 1, "parallel.dp_shard": 2}),
    "pp, tp": (4, {"parallel.pp": 2, "parallel.tp": 2, "train.accumulate": 2}),
}


def cell(layout: str, model: str = "untied") -> Cell:
    ranks, keys = (COVERING | MORE | {"single": (1, {})})[layout]
    return Cell(model, ranks, tuple((LORA | keys).items()))


def trained(cells: list[Cell], folder: Path) -> list[tuple[Result, Result]]:
    """Train each cell, and once more from a checkpoint of the cell before it after two steps."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = []
    for i, made in enumerate(cells):
        training = saved(made, folder / str(i), BASE)
        training.run(made, made.steps - BEFORE)
        again = resumed(made, folder / str(max(0, i - 1)), BASE)
        ends.append((finished(made, training), again))
    return ends


@functools.cache
def alone() -> Result:
    (result,) = run_ranks(train, 1, cell("single"))
    return result  # type: ignore[no-any-return]


def check(cells: list[Cell], expected: Result, folder: Path) -> None:
    """Check that all are as one process, and go on from the checkpoints of each other."""
    for size in sorted({made.ranks for made in cells}):
        alike = [made for made in cells if made.ranks == size]
        for answer in run_ranks(trained, size, alike, folder / str(size), timeout=480):
            for undisturbed, again in answer:
                within(difference(undisturbed, expected), EXACT)
                within(difference(again, rest_of(expected)), EXACT)
        held = TensorReader(folder / str(size) / "0" / "step-00000002").saved
        assert all(
            is_adapter(name) or name.endswith(".balance") for name in held if name[:6] == "model."
        )


@pytest.mark.parametrize("names", either([COVERING], [MORE]), ids=["some", "more"])
def test_every_layout_trains_and_resumes_as_one_process(
    names: Iterable[str], tmp_path: Path
) -> None:
    expected = alone()
    moved = [name for name in expected.parameters if is_adapter(name)]
    assert len(moved) == 4 * 4 * 2
    start = Transformer(64, 32, 4, 4, 2)
    assert len(expected.parameters) == len(start.state_dict()) + len(moved)
    check([cell(name) for name in names], expected, tmp_path)


@pytest.mark.parametrize("layouts", either([["tp"]], [["zero3", "tp"]]), ids=", ".join)
def test_a_tied_head_is_trained_by_a_name_that_is_not_its_first(layouts: list[str]) -> None:
    keys = LORA | {"train.lora.also": ("head.*",)}
    expected = reference("transformer", keys=tuple(keys.items()))
    start = reference("transformer", "sgd", 1, keys=tuple(keys.items()))
    moved = {n for n, p in start.parameters.items() if (p != expected.parameters[n]).any()}
    assert {name for name in moved if not is_adapter(name)} == {"embed.weight"}
    cells = [Cell("transformer", 2, tuple((keys | COVERING[name][1]).items())) for name in layouts]
    for by_rank in results(tuple(cells)).values():
        for result in by_rank:
            within(difference(result, expected), EXACT)


ANY = ["single", "zero3", "ddp", "tp", "pp", "cp", "tp, zero3", "pp, tp"]


@pytest.mark.parametrize(
    ("before", "after"),
    either(
        [("zero3", ["single"])],
        [(before, ANY) for before in ("single", "zero3", "tp", "tp, zero3", "pp, tp")],
        several=True,
    ),
)
def test_other_numbers_of_ranks_go_on_with_the_adapters(
    before: str, after: list[str], tmp_path: Path
) -> None:
    rest = rest_of(alone())
    run_ranks(save, cell(before).ranks, cell(before), tmp_path, BASE)
    for name in after:
        for result in run_ranks(resumed, cell(name).ranks, cell(name), tmp_path, BASE):
            within(difference(result, rest), EXACT)


EP: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"parallel.ep": 2}),
    "ep, zero3": (2, ZERO3 | {"parallel.ep": 2}),
    "ep 2 of 4, zero3": (4, ZERO3 | {"parallel.ep": 2}),
    "zero3, no ep": (2, ZERO3),
}


def experts(name: str) -> Cell:
    ranks, keys = (EP | {"single": (1, {})})[name]
    return Cell("moe", ranks, tuple((LORA | keys).items()))


@pytest.mark.parametrize("names", either([["ep, zero3"]], [[*EP]]), ids=["some", "more"])
def test_adapters_beside_divided_experts_train_and_resume_as_one_process(
    names: list[str], tmp_path: Path
) -> None:
    """The experts are frozen and divided; their balance goes on."""
    (expected,) = run_ranks(train, 1, experts("single"))
    moved = [name for name in expected.parameters if is_adapter(name)]
    assert len(moved) == 2 * (3 * 3 + 1 + 2)  # attention, a dense MLP, two shared experts
    check([experts(name) for name in names], expected, tmp_path)


def test_the_model_begins_as_it_was_and_only_adapters_are_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.randn(5, 4)
    before = model(x)
    add_adapters(model, ["0"], 2, 4.0)
    freeze_base(model, ["2.bias"])
    assert torch.equal(model(x), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["0.lora_A", "0.lora_B", "2.bias"]
    layer = model[0]
    assert isinstance(layer, Adapted)
    assert isinstance(layer, nn.Linear)
    nn.init.normal_(layer.lora_B)
    merged = layer.weight + layer.change()
    torch.testing.assert_close(layer(x), nn.functional.linear(x, merged, layer.bias))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.qeury", "no module has such a name; linear layers are *."),
        ("layers.0", "layers.0 is a Layer, and adapters belong to linear layers; linear"),
        ("embed", "embed is a Embedding, and adapters belong"),
    ],
)
def test_patterns_that_fit_no_linear_layer(pattern: str, message: str) -> None:
    with torch.device("meta"):
        model = Transformer(64, 32, 2, 4, 2)
    with pytest.raises(ConfigError) as caught:
        add_adapters(model, [pattern], 4, 8.0)
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="rank=99: a matched layer has 32 inputs"):
        add_adapters(model, ["*.query"], 99, 8.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"precision.compute": "fp8"}, "with precision.compute=fp8: its layers have no adapters"),
        ({"train.lora.dropout": 0.1, "parallel.tp": 2}, "would draw different masks; use 0"),
        ({"train.lora.quantize": "nf4", "parallel.pp": 2}, "parallel.pp=2: a weight in 4 bits"),
        ({"train.lora.quantize": "nf4", "parallel.dp_shard": 2}, "dp_shard=2: a weight in 4 bits"),
        ({"train.lora.quantize": "nf4", "train.compile": "model"}, "compile=model: not tested"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], message: str) -> None:
    given = {"checkpoint.init_from": "/x", "train.lora.match": "*"}
    config = config_with(given | keys)
    assert message in "\n".join(refused(config, "adapters"))


@pytest.mark.slow
def test_a_run_trains_adapters_of_another_run(train: Train, tmp_path: Path) -> None:
    quick = ("monitor.enabled=false", "tracking=off", "train.max_steps=6")
    train(*quick)
    (first,) = runs(tmp_path / "runs")
    lora = "train.lora={match: '[13]', rank: 4, alpha: 8, also: ['5.*']}"
    given = (*quick, lora, f"checkpoint.init_from={first.name}", "checkpoint.every_steps=2")
    train(*given)
    (second,) = set(runs(tmp_path / "runs")) - {first}
    checkpoint = second / "checkpoints" / "step-00000006"
    saved = [n for n in TensorReader(checkpoint).saved if n.startswith("model.")]
    assert sorted(saved) == [
        *("model.1.lora_A", "model.1.lora_B", "model.3.lora_A", "model.3.lora_B"),
        *("model.5.bias", "model.5.weight"),
    ]
    base = load_run(first).model().state_dict()
    found = load_run(second).model().state_dict()
    assert all(torch.equal(found[name], base[name]) for name in ("1.weight", "3.bias"))
    assert not torch.equal(found["5.weight"], base["5.weight"])
    assert found["1.lora_B"].any()
    # Resumed from the middle, the run ends with the same bits.
    expected = journal_result(second)
    checkpoint.rename(tmp_path / checkpoint.name)
    (second / "run.json").write_text(json.dumps(run_json(second) | {"state": "interrupted"}))
    train(*given)
    assert journal_result(second) == expected
    # As a start for others, and with other weights below them, adapters alone are refused.
    told = train(*quick, f"checkpoint.init_from={second.name}", code=2).stderr
    assert "has only adapters (LoRA) of the weights xxh3_128:" in told
    # Adapters of other weights are refused, whoever loads them.
    facts = Manifest.read(checkpoint)
    replace(facts, base="xxh3_128:other").write(checkpoint)
    with pytest.raises(StorageError, match="has adapters of other weights"):
        load_run(second).model()


def journal_result(run: Path) -> dict[str, float]:
    result = run_json(run)["result"]
    return {name: value for name, value in result.items() if not name.startswith("perf/")}
