"""Runs that start from other weights: names, shapes, layouts, identity, and what is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpctrain.config.schema import CheckpointConfig
from hpctrain.engine.checkpoint.starting_point import start_from
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.errors import ConfigError, StorageError
from hpctrain.runs.checkpoints.matching import Rename, match
from hpctrain.runs.checkpoints.weight_files import find_weights
from hpctrain.runs.chosen_checkpoint import pin
from tests.conftest import Completed, run_json, run_module, runs
from tests.parallel.parity import MODELS, Cell, build, checkpointer, either, initialised, whole
from tests.ranks import run_ranks

Train = Callable[..., Completed]
CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"parallel.dp_replicate": 1, "parallel.dp_shard": -1}),
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2, "train.accumulate": 2}),
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp": (4, {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}),
    "tp, zero3": (4, {"parallel.tp": 2, "parallel.dp_replicate": 1, "parallel.dp_shard": 2}),
    "pp, tp": (4, {"parallel.pp": 2, "parallel.tp": 2, "train.accumulate": 2}),
    "offload": (
        2,
        {"parallel.dp_replicate": 1, "parallel.dp_shard": -1, "parallel.fsdp.offload": True},
    ),
}


def test_a_star_stands_for_any_text() -> None:
    rename = [Rename("model.*.old_*", "*.new_*"), Rename("model.*", "*"), Rename("x", "y")]
    stored = {"model.a.b.old_w": (2,), "model.c": (3,), "x": ()}
    found = match(stored, {"a.b.new_w": (2,), "c": (3,), "y": (), "z": (5,)}, rename)
    assert found.stored == {"a.b.new_w": "model.a.b.old_w", "c": "model.c", "y": "x"}
    assert found.initial == ["z"]
    assert str(found) == "3 of 4 weights of the model are loaded; initial values: z"


@pytest.mark.parametrize(
    ("rename", "skip", "message"),
    [
        ([Rename("modle.*", "*")], [], "init_rename=modle.*: it fits no name; there are model."),
        ([], ["heat.*"], "init_skip=heat.*: it fits no name; there are head.w"),
        ([Rename("model.*", "a")], [], "model.a and model.b would both be a"),
        ([Rename("model.*", "*")], [], "head.w is 3 x 2 there and 4 x 2 in the model"),
        ([Rename("*", "q.*")], [], "no weight has a name of the model: there are model.a"),
    ],
)
def test_what_does_not_match(rename: list[Rename], skip: list[str], message: str) -> None:
    stored = {"model.a": (2,), "model.b": (2,), "head.w": (3, 2)}
    with pytest.raises(ConfigError) as caught:
        match(stored, {"a": (2,), "b": (2,), "head.w": (4, 2)}, rename, skip)
    assert message in str(caught.value)


def _loaded(cells: list[Cell], path: Path, rename: list[Rename]) -> list[dict[str, torch.Tensor]]:
    """Return the parameters of each layout after it has loaded the weights."""
    found = []
    for cell in cells:
        model = build(cell).model
        stages = model.mesh.pp_group if model.mesh.degrees.pp > 1 else None
        matched = start_from(model.module, open_weights(find_weights(path)), rename, (), stages)
        assert not matched.initial
        assert not matched.unused
        found.append(whole(model))
    return found


def _saved(cell: Cell, folder: Path) -> None:
    training = build(cell)
    training.run(cell, 1)
    checkpointer(training, folder).save(1, {"step": 1})


@pytest.mark.parametrize("layouts", either([LAYOUTS], [MORE]), ids=["some", "more"])
def test_every_layout_loads_every_weight(
    layouts: dict[str, tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """Every layout loads the files of Hugging Face's kind, and the checkpoint of another layout."""
    cells = {name: Cell("untied", n, tuple(keys.items())) for name, (n, keys) in layouts.items()}
    expected = dict(initialised(MODELS["untied"], 7, torch.float32, CPU).state_dict())
    names = sorted(expected)
    (tmp_path / "hf").mkdir()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({f"model.{n}": expected[n].bfloat16() for n in part}, tmp_path / "hf" / file)
    index = {"weight_map": {f"model.{n}": file for file, part in files.items() for n in part}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    rename = [Rename("model.*", "*")]
    by_size = {
        n: [c for c in cells.values() if c.ranks == n] for n in {*(c.ranks for c in cells.values())}
    }
    for size, group in by_size.items():
        for answer in run_ranks(_loaded, size, group, tmp_path / "hf", rename):
            for parameters in answer:
                for name in names:
                    assert torch.equal(parameters[name], expected[name].bfloat16().float()), name
    saver = cells[next(reversed(cells))]
    run_ranks(_saved, saver.ranks, saver, tmp_path / "steps")
    results = [
        parameters
        for size, group in by_size.items()
        for answer in run_ranks(_loaded, size, group, tmp_path / "steps" / "step-00000001", [])
        for parameters in answer
    ]
    for parameters in results:
        assert all(torch.equal(parameters[name], results[0][name]) for name in names)
    assert not torch.equal(results[0][names[0]], expected[names[0]])


def test_a_run_starts_from_another_and_resumes_from_itself(train: Train, tmp_path: Path) -> None:
    quick = ("monitor.enabled=false", "tracking=off")
    train("train.max_steps=6", *quick)
    (first,) = runs(tmp_path / "runs")
    other = (
        "train.max_steps=4",
        "seed=5",
        "optimizer.lr=1e-9",
        f"checkpoint.init_from={first.name}",
        "checkpoint.every_steps=2",
    )
    said = train(*other, *quick).stderr
    (second,) = set(runs(tmp_path / "runs")) - {first}
    there = first / "checkpoints" / "step-00000006"
    assert f"the weights of {there}: 6 of 6 weights of the model are loaded\n" in said
    # Nearly without a learning rate, the second run ends where the first has ended.
    results = [run_json(run)["result"]["val/loss"] for run in (first, second)]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    # A copy elsewhere is the same weights, so it is the same run; it finds itself finished.
    shutil.copytree(first, tmp_path / "copy")
    copied = train(*other[:3], f"checkpoint.init_from={tmp_path}/copy", *quick)
    assert f"{second.name} is finished already" in copied.stdout
    # A run resumes without the weights that it has started from.
    state = run_json(second)
    (second / "run.json").write_text(json.dumps(state | {"state": "interrupted"}))
    shutil.rmtree(second / "checkpoints" / "step-00000004")
    shutil.rmtree(first)
    done = run_module("hpctrain", "run", str(second))
    assert "the weights of" not in done.stderr
    assert run_json(second)["result"]["step"] == 4


@pytest.mark.slow
def test_other_weights_than_asked_for_are_refused(train: Train, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    quick = ("monitor.enabled=false", "tracking=off", "train.max_steps=2")
    told = train(*quick, f"checkpoint.init_from={file}", code=2).stderr
    assert "1.weight is 10 x 64 there and 256 x 64 in the model" in told
    assert "checkpoint.init_skip=[" in told
    skip = "checkpoint.init_skip=[1.*]"
    told = train(*quick, f"checkpoint.init_from={file}", skip, code=2).stderr
    assert "no weight has a name of the model" in told
    (run,) = [run for run in runs(tmp_path / "runs") if run_json(run)["state"] == "failed"][-1:]
    save_file({"1.bias": torch.zeros(10)}, file)
    told = run_module("hpctrain", "run", str(run), code=6).stderr
    assert "other weights (xxh3_128:" in told


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.bin", b"", "model.bin is a pickle, which can run code"),
        ("last.ckpt", b"", "torch.load(FILE, map_location='cpu')['state_dict']; safetensors"),
        ("adapter_config.json", b"{}", "has only adapters (LoRA), in the format of peft"),
        ("note.txt", b"", "no weights; there must be a run directory"),
        ("model.safetensors", b"\x08" + bytes(7) + b"not JSON", "not a whole safetensors file"),
        ("model.safetensors", b"", "header too small"),
        (
            "model.safetensors",
            b"\x40"
            + bytes(7)
            + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(64),
            "file not fully covered",
        ),
        ("model.safetensors.index.json", b"{}", "it has no weight_map"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "../b.safetensors"}}',
            "../b.safetensors of a is not a file in the same folder",
        ),
    ],
)
def test_files_that_are_no_weights(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ConfigError, StorageError)) as caught:
        find_weights(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model.safetensors"])
def test_weights_that_are_no_files(name: str, tmp_path: Path) -> None:
    """A folder, a loop of links, a FIFO: nothing is waited for, and the key is named."""
    for make in (Path.mkdir, lambda path: path.symlink_to(path.name), os.mkfifo):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        make(folder / name)
        given = CheckpointConfig(init_from=str(folder))
        with pytest.raises(
            StorageError, match=rf"^checkpoint\.init_from: {folder}/.*it (is|cannot)"
        ):
            pin(given, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.init_skip=[a]"], "checkpoint.init_skip=['a'] needs checkpoint.init_from"),
        (["checkpoint.init_from=nowhere"], "no such file or folder, and no run of that name in"),
        (["checkpoint.init_from=s3://x/y"], "it must be a folder or a file on a disk"),
        (
            ["checkpoint.init_from=.", "checkpoint.init_rename=[{match: a, too: b}]"],
            "it must be {match: PATTERN, to: NAME}",
        ),
        (
            ["checkpoint.init_from=.", "checkpoint.init_rename=[{match: 'a*', to: '*b*'}]"],
            "`to` has 2 times *, `match` has 1",
        ),
    ],
)
def test_keys_that_do_not_fit(overrides: list[str], message: str, train: Train) -> None:
    assert message in train(*overrides, code=2).stderr
