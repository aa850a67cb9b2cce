"""Adapters (LoRA): the numbers of one process in every layout, checkpoints, and what is refused."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain import load_run
from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.tensor_reader import Reader
from hpctrain.config.rules import starting_weights
from hpctrain.config.schema import Config
from hpctrain.distributed.ranks import RankInfo
from hpctrain.errors import ConfigError, StorageError
from hpctrain.models import Transformer
from hpctrain.models.lora import Adapted, add_adapters, freeze_base, is_adapter
from hpctrain.parallel.preparing.blocks import find_blocks
from tests.conftest import Completed, run_json, runs
from tests.parallel.parity import (
    TOLERANCE,
    Cell,
    Result,
    build,
    difference,
    reference,
    results,
    train,
    whole,
)
from tests.ranks import run_ranks

Train = Callable[..., Completed]
LORA: dict[str, Any] = {
    "train.lora.match": ("*.query", "*.value", "*.out", "*.down"),
    "train.lora.rank": 4,
}
ZERO3: dict[str, Any] = {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}
COVERING: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, ZERO3),
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2, "train.accumulate": 2}),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "cp": (2, {"parallel.cp": 2}),
    "zbv": (
        2,
        {"parallel.pp": 2, "train.accumulate": 4, "parallel.pipeline.schedule": "zbv"},
    ),
    "whole sequence": (2, {"parallel.tp": 2, "parallel.sequence_parallel": False}),
    "checkpointing": (2, ZERO3 | {"train.activation_checkpointing": "full"}),
    "offload": (2, ZERO3 | {"parallel.fsdp.offload": True}),
    "tp, zero3": (4, {"parallel.tp": 2, "parallel.dp_replicate": 1, "parallel.dp_shard": 2}),
    "pp, tp": (4, {"parallel.pp": 2, "parallel.tp": 2, "train.accumulate": 2}),
}


def cell(layout: str, model: str = "untied") -> Cell:
    ranks, keys = (COVERING | MORE | {"single": (1, {})})[layout]
    return Cell(model, ranks, tuple((LORA | keys).items()))


def saver(training: Any, folder: Path) -> Checkpointer:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    ranks = RankInfo("test", rank, rank, 0, size, size, 1, "localhost", 1)
    return Checkpointer(folder, 2, ranks, training.model, training.step.optimizer, base="abc")


def trained(cells: list[Cell], folder: Path) -> list[tuple[Result, Result]]:
    """Train each cell, and once more from a checkpoint of the cell before it after two steps."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = []
    for i, made in enumerate(cells):
        training = build(made)
        training.run(made, 2)
        saver(training, folder / str(i)).save(2, {"step": 2})
        training.run(made, made.steps - 2)
        undisturbed = Result(training.losses, training.norms, whole(training.model))
        again = build(made)
        assert saver(again, folder / str(max(0, i - 1))).load_latest() == {"step": 2}
        again.seen = 2
        again.run(made, made.steps - 2)
        ends.append((undisturbed, Result(again.losses, again.norms, whole(again.model))))
    return ends


@functools.cache
def alone() -> Result:
    (result,) = run_ranks(train, 1, cell("single"))
    return result  # type: ignore[no-any-return]


def check(layouts: dict[str, tuple[int, dict[str, Any]]], folder: Path) -> None:
    expected = alone()
    start = Transformer(64, 32, 4, 4, 2)
    moved = [name for name in expected.parameters if is_adapter(name)]
    assert len(moved) == 4 * 4 * 2
    assert len(expected.parameters) == len(start.state_dict()) + len(moved)
    rest = Result(expected.losses[2:], expected.norms[2:], expected.parameters)
    for size in {ranks for ranks, _ in layouts.values()}:
        cells = [cell(name) for name, (ranks, _) in layouts.items() if ranks == size]
        for answer in run_ranks(trained, size, cells, folder / str(size)):
            for undisturbed, resumed in answer:
                assert max(difference(undisturbed, expected)) < TOLERANCE
                assert max(difference(resumed, rest)) < TOLERANCE
        made = Reader(folder / str(size) / "0" / "step-00000002").saved
        assert all(is_adapter(name) for name in made if name.startswith("model."))


def test_every_layout_trains_and_resumes_as_one_process(tmp_path: Path) -> None:
    check(COVERING, tmp_path)


@pytest.mark.slow
def test_more_layouts_train_and_resume_as_one_process(tmp_path: Path) -> None:
    check(MORE, tmp_path)


def check_tied_head(layouts: list[str]) -> None:
    keys = LORA | {"train.lora.also": ("head.*",)}
    expected = reference("transformer", keys=tuple(keys.items()))
    start = reference("transformer", "sgd", 1, keys=tuple(keys.items()))
    moved = {n for n, p in start.parameters.items() if (p != expected.parameters[n]).any()}
    assert {name for name in moved if not is_adapter(name)} == {"embed.weight"}
    cells = [Cell("transformer", 2, tuple((keys | COVERING[name][1]).items())) for name in layouts]
    for by_rank in results(tuple(cells)).values():
        for result in by_rank:
            assert max(difference(result, expected)) < TOLERANCE


def test_a_tied_head_is_trained_by_a_name_that_is_not_its_first() -> None:
    check_tied_head(["tp"])


@pytest.mark.slow
def test_a_tied_head_is_trained_in_more_layouts() -> None:
    check_tied_head(["zero3", "tp"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp", "zero3"])
def test_the_average_of_adapters_is_that_of_one_process(layout: str) -> None:
    """With groups, frozen parts and clipping, too, as the other features are."""
    single = replace(cell("single"), optimizer="features")
    expected = reference("untied", "features", keys=single.keys)
    averaged = [name for name in expected.parameters if name.startswith("ema.")]
    assert averaged
    assert all(is_adapter(name) for name in averaged)
    made = replace(cell(layout), optimizer="features")
    for result in results((made,))[made]:
        assert max(difference(result, expected)) < TOLERANCE


def saved_after_two(made: Cell, folder: Path) -> None:
    training = build(made)
    training.run(made, 2)
    saver(training, folder).save(2, {"step": 2})


def resumed(made: Cell, folder: Path) -> Result:
    again = build(made)
    assert saver(again, folder).load_latest() == {"step": 2}
    again.seen = 2
    again.run(made, made.steps - 2)
    return Result(again.losses, again.norms, whole(again.model))


def check_other_numbers_of_ranks(before: str, after: list[str], folder: Path) -> None:
    """Check that each layout goes on with the adapters of one that had other ranks."""
    expected = alone()
    rest = Result(expected.losses[2:], expected.norms[2:], expected.parameters)
    run_ranks(saved_after_two, cell(before).ranks, cell(before), folder)
    for name in after:
        for result in run_ranks(resumed, cell(name).ranks, cell(name), folder):
            assert max(difference(result, rest)) < TOLERANCE, name


def test_other_numbers_of_ranks_go_on_with_the_adapters(tmp_path: Path) -> None:
    check_other_numbers_of_ranks("zero3", ["single"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["single", "zero3", "tp", "tp, zero3", "pp, tp"])
def test_every_number_of_ranks_goes_on_with_the_adapters(before: str, tmp_path: Path) -> None:
    after = ["single", "zero3", "ddp", "tp", "pp", "cp", "tp, zero3", "pp, tp"]
    check_other_numbers_of_ranks(before, after, tmp_path)


EP: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"parallel.ep": 2}),
    "ep, zero3": (2, ZERO3 | {"parallel.ep": 2}),
    "ep 2 of 4, zero3": (4, ZERO3 | {"parallel.ep": 2}),
    "zero3, no ep": (2, ZERO3),
}


def experts(name: str) -> Cell:
    ranks, keys = (EP | {"single": (1, {})})[name]
    return Cell("moe", ranks, tuple((LORA | keys).items()))


def check_experts(names: list[str], folder: Path) -> None:
    """Check adapters beside experts, which are frozen and divided; their balance goes on."""
    (expected,) = run_ranks(train, 1, experts("single"))
    moved = [name for name in expected.parameters if is_adapter(name)]
    assert len(moved) == 2 * (3 * 3 + 1 + 2)  # attention, a dense MLP, two shared experts
    rest = Result(expected.losses[2:], expected.norms[2:], expected.parameters)
    for size in sorted({EP[name][0] for name in names}):
        cells = [experts(name) for name in names if EP[name][0] == size]
        for answer in run_ranks(trained, size, cells, folder / str(size)):
            for undisturbed, resumed in answer:
                assert max(difference(undisturbed, expected)) < TOLERANCE
                assert max(difference(resumed, rest)) < TOLERANCE


def test_adapters_beside_divided_experts_train_and_resume_as_one_process(tmp_path: Path) -> None:
    check_experts(["ep, zero3"], tmp_path)


@pytest.mark.slow
def test_adapters_beside_experts_in_more_layouts(tmp_path: Path) -> None:
    check_experts(list(EP), tmp_path)


def test_adapters_change_no_blocks() -> None:
    layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    before = [name for name, _ in find_blocks(layers, [])]
    assert before == [name for name, _ in find_blocks(layers, ["Linear"])] == ["0", "2", "3"]
    add_adapters(layers, ["[02]"], 2, 4.0)
    assert before == [name for name, _ in find_blocks(layers, [])]
    assert before == [name for name, _ in find_blocks(layers, ["Linear"])]


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
        ("*.qeury", "no module has such a name; linear layers are *.query"),
        ("layers.0", "layers.0 is a Layer; adapters belong to linear layers, such as"),
        ("embed", "embed is a Embedding; adapters belong to linear layers"),
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
        ({"checkpoint.init_from": None}, "needs checkpoint.init_from: the weights that the"),
        ({"precision.compute": "fp8"}, "with precision.compute=fp8: its layers have no adapters"),
        ({"train.lora.dropout": 0.1, "parallel.tp": 2}, "would draw different masks; use 0"),
        ({"train.lora.match": None, "train.lora.also": ["head"]}, "needs train.lora.match"),
        ({"train.lora.match": None, "train.lora.quantize": "nf4"}, "quantize=nf4 needs train.lora"),
        ({"train.lora.quantize": "nf4", "parallel.pp": 2}, "parallel.pp=2: a weight in 4 bits"),
        ({"train.lora.quantize": "nf4", "parallel.dp_shard": -1}, "FSDP2 cannot divide a weight"),
        ({"train.lora.quantize": "nf4", "train.compile": "model"}, "compile=model: not tested"),
    ],
)
def test_what_does_not_go_together(keys: dict[str, Any], message: str) -> None:
    config = Config()
    for key, value in ({"checkpoint.init_from": "/x", "train.lora.match": "*"} | keys).items():
        section, _, name = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), config), name, value)
    assert message in "\n".join(
        starting_weights.problems(
            config.checkpoint, config.train, config.parallel, config.precision
        )
    )


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
    saved = [n for n in Reader(checkpoint).saved if n.startswith("model.")]
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
