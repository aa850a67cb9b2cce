"""Exported weights: equal to those of the checkpoint, and read back by transformers and peft."""

import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpctrain import load_run
from hpctrain.config.schema import Config
from hpctrain.config.sections import ModelSections
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.checkpoint.starting_point import start_from
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.checkpoint.tensor_reader import TensorReader
from hpctrain.engine.layers.lora import Adapted
from hpctrain.errors import ConfigError, StorageError
from hpctrain.results.commands.export import main
from hpctrain.results.exporting.exporter import Exported, Exporter
from hpctrain.results.trained_model import trained_model
from hpctrain.runs.checkpoints.weight_files import find_weights
from tests.bounds import EXACT, within
from tests.conftest import Completed, only_run, run_module
from tests.parallel.parity import FP32, Values
from tests.ranks import run_ranks
from tests.trained.exporting import (
    FAMILIES,
    FP64,
    LAYOUTS,
    LLAMA,
    WHAT,
    ZERO3,
    Odd,
    adapted,
    apart,
    check,
    logits,
    odd,
    read_back,
    save,
)

Train = Callable[..., Completed]


def export(config: Config, checkpoint: Path, out: Path, **options: Any) -> Exported:
    out.mkdir()
    limit = options.pop("shard_bytes", 10**9)
    return Exporter(ModelSections.of(config), checkpoint, **options).write(
        out, limit, lambda name: None
    )


# Prints by how many bytes the process has grown at most.
MEASURED = """
import json, pathlib, sys
from hpctrain.config.sections import ModelSections
from hpctrain.config.schema import Config
from hpctrain.engine.layers.lora import Adapted
from hpctrain.results.exporting.exporter import Exporter

def memory(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024

config = Config(model=json.loads(sys.argv[1]))
exporter = Exporter(ModelSections.of(config), pathlib.Path(sys.argv[2]))
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS")
exporter.write(pathlib.Path(sys.argv[3]), int(sys.argv[4]), lambda name: None)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_the_memory_of_an_export_is_that_of_one_file(tmp_path: Path) -> None:
    node = LLAMA | {"vocab_size": 4096, "dim": 512, "layers": 8, "heads": 8}
    checkpoints, shard = tmp_path / "run" / "checkpoints", 16 * 10**6
    run_ranks(save, 2, node, ZERO3 + FP32, checkpoints, "")
    (tmp_path / "out").mkdir()
    words = [json.dumps(node), str(checkpoints / "step-00000001"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words, str(shard)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    files = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    print(f"{sum(files)} bytes in {len(files)} files: the process has grown by {done.stdout}")
    assert sum(files) > 100 * 10**6
    # Beside a file there is what reads one tensor, and what the allocator keeps.
    assert int(done.stdout) < 2.5 * shard


def test_transformers_reads_our_llama(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, checkpoint = Config(model=LLAMA, precision=FP64), tmp_path / "step-00000001"
    run_ranks(save, 2, LLAMA, ZERO3, tmp_path, "")
    made = export(config, checkpoint, tmp_path / "out", shard_bytes=40_000)
    assert len(made.files) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = trained_model(ModelSections.of(config), checkpoint)
    # The Llama of transformers computes norms and angles in float32, whatever its weights are in.
    within([apart(logits(theirs), logits(ours))], 1e-5)
    export(config, checkpoint, tmp_path / "half", dtype="bf16")
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    for name, value in load_file(tmp_path / "half/model.safetensors").items():
        assert torch.equal(value, theirs.state_dict()[name].bfloat16()), name


def test_a_run_is_exported_as_it_was_trained(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("train.max_steps=2", "monitor.enabled=false", "tracking=off")
    run = only_run(tmp_path)
    given = (run.name, "out", "--dir", f"{tmp_path}/runs")
    said = run_module("hpctrain", "export", *given, cwd=tmp_path).stdout
    assert f"out: step-00000002 of {run.name}, 0.3 MB in 1 file, its own names" in said
    expected = load_run(run).model().state_dict()
    files = find_weights(tmp_path / "out")
    assert files.tensors is not None
    assert files.tensors.keys() == expected.keys()
    found = {
        n: v
        for file in (tmp_path / "out").glob("*.safetensors")
        for n, v in load_file(file).items()
    }
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    origin = json.loads((tmp_path / "out" / "hpctrain.json").read_text())
    assert (origin["run"], origin["step"]) == (run.name, 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out exists: give a folder that does not, or an empty"):
        main([*given])
    with pytest.raises(ConfigError, match="--merge: the run has no adapters"):
        main([run.name, "x", "--merge"])


def test_adapters_belong_to_the_weights_that_they_were_trained_on(tmp_path: Path) -> None:
    config, trained, base = adapted(LLAMA, ["*.query", "*.down"], [], tmp_path)
    checkpoint = tmp_path / "step"
    read_back(config, checkpoint, logits(trained), base, tmp_path)
    # The base weights have been replaced since the training.
    save_file({"a": torch.zeros(1)}, tmp_path / "base.safetensors")
    with pytest.raises(StorageError, match="other weights"):
        Exporter(ModelSections.of(config), checkpoint, merge=True)
    config.checkpoint.init_digest = "xxh3_128:0"
    with pytest.raises(StorageError, match="has adapters of other weights"):
        Exporter(ModelSections.of(config), checkpoint)


def test_adapters_and_others_that_are_frozen(tmp_path: Path) -> None:
    """A frozen adapter is in the checkpoint; other frozen parameters are those of the base."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    file, checkpoint = tmp_path / "base.safetensors", tmp_path / "step-00000001"
    save_file(instantiate("model", LLAMA).state_dict(), file)
    config = Config(model=LLAMA, precision=FP64)
    config.optimizer.groups = Values([{"match": ["layers.1.*", "norm.*"], "freeze": True}])
    lora = config.train.lora
    lora.match, lora.also, lora.rank = ["*.query", "*.down"], ["head.*", "norm.*"], 4
    start = config.checkpoint
    start.init_from, start.init_digest = str(file), find_weights(file).digest()
    given = {"match": tuple(lora.match), "also": tuple(lora.also), "rank": 4}
    keys = (*ZERO3, ("optimizer.groups", config.optimizer.groups))
    keys += tuple((f"train.lora.{key}", value) for key, value in given.items())
    run_ranks(save, 2, LLAMA, keys, tmp_path, start.init_digest)
    model = trained_model(ModelSections.of(config), checkpoint)
    base = load_file(tmp_path / "base.safetensors")
    saved = TensorReader(checkpoint).saved
    assert {"model.layers.1.mlp.down.lora_A", "model.layers.1.mlp.down.lora_B"} <= {*saved}
    assert "model.norm.weight" not in saved
    found = model.state_dict()
    assert found["layers.1.mlp.down.lora_B"].any(), "the saved value, and not that of a new adapter"
    assert torch.equal(found["norm.weight"], base["norm.weight"])
    assert not torch.equal(found["head.weight"], base["head.weight"])
    export(config, checkpoint, tmp_path / "merged", merge=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    change = merged["model.layers.1.mlp.down_proj.weight"] - base["layers.1.mlp.down.weight"]
    down = model.get_submodule("layers.1.mlp.down")
    assert isinstance(down, Adapted)
    within([apart(change, down.change().detach())], EXACT)


@pytest.mark.parametrize(("name", "of_head"), [("hf llama", True), ("hf gpt2", False)])
def test_adapters_of_models_of_transformers(name: str, of_head: bool, tmp_path: Path) -> None:
    """A head that shares its weight has an adapter for itself, and so it is not merged."""
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    match = [family.query, *[family.head] * of_head]
    config, trained, base = adapted(family.tied, match, [], tmp_path)
    read_back(config, tmp_path / "step", logits(trained), base, tmp_path, merges=not of_head)


DEFAULT = ("own gpt2", False, "also norm", "tp")

CELLS = [
    pytest.param(*cell, marks=[] if cell == DEFAULT else [pytest.mark.slow])
    for cell in itertools.product(FAMILIES, (True, False), WHAT, LAYOUTS)
    for name, tied, what, layout in [cell]
    if (layout != "pp" or not tied) and (layout in ("one", "zero3") or name.startswith("own"))
]


@pytest.mark.parametrize(("name", "tied", "what", "layout"), CELLS)
def test_every_export_is_the_trained_model(
    name: str, tied: bool, what: str, layout: str, tmp_path: Path
) -> None:
    print(f"{check(name, what, layout, tmp_path, tied=tied):.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_base_that_has_the_shared_weight_under_the_name_of_the_head(
    name: str, tmp_path: Path
) -> None:
    head = f"{FAMILIES[name].head}.weight"
    check(name, "also embed", "zero3", tmp_path, tied=True, stored=head)


@pytest.mark.parametrize(
    "match", [pytest.param(["fc"], marks=pytest.mark.slow), ["*fc", "deep.1.0"]]
)
@pytest.mark.parametrize("tied", [False, True])
def test_odd_models_are_read_by_peft(match: list[str], tied: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config, trained, base = adapted(odd(tied=tied), match, [], tmp_path)
    x = torch.randn(5, 8)
    (tmp_path / "adapters").mkdir()
    Exporter(ModelSections.of(config), tmp_path / "step").write(tmp_path / "adapters", 200, print)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
        within([apart(theirs(x), trained(x))], EXACT)
    if tied:
        with pytest.raises(ConfigError, match=r"--merge: fc.weight and first.weight are one para"):
            Exporter(ModelSections.of(config), tmp_path / "step", merge=True)
        return
    (tmp_path / "merged").mkdir()
    Exporter(ModelSections.of(config), tmp_path / "step", merge=True).write(
        tmp_path / "merged", 10**9, print
    )
    merged = Odd(tied=tied)
    start_from(merged, open_weights(find_weights(tmp_path / "merged")), all_used=True)
    within([apart(merged.eval()(x), trained(x))], EXACT)


def test_an_adapter_in_two_places_is_no_adapter_of_peft(tmp_path: Path) -> None:
    config, trained, _ = adapted(odd(), ["deep.0"], [], tmp_path)
    with pytest.raises(ConfigError, match=r"same stands in several places of the model, and peft"):
        Exporter(ModelSections.of(config), tmp_path / "step")
    (tmp_path / "merged").mkdir()
    Exporter(ModelSections.of(config), tmp_path / "step", merge=True).write(
        tmp_path / "merged", 10**9, print
    )
    merged, x = Odd(), torch.randn(5, 8)
    start_from(merged, open_weights(find_weights(tmp_path / "merged")), all_used=True)
    within([apart(merged.eval()(x), trained(x))], EXACT)
