"""Tests of `plan`: the answer as a whole, and what it says where something is wrong."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.insight.estimates.hardware import load
from hpctrain.insight.plan.budget import Budget, budget_of
from hpctrain.insight.plan.inspecting.activations import Activations, MeasuredActivations
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.memory import memory_of
from hpctrain.insight.plan.model_sizes import ModelSizes
from hpctrain.insight.plan.plan_command import main
from hpctrain.insight.plan.predicting.timing import gather_s, link_of
from hpctrain.tasks import LanguageModel

LM = ["model=lm_small", "--sample-shape", "257", "train.global_batch_size=64", "precision=bf16"]
BILL = {"steps", "hours", "gpu_hours", "kwh", "cost", "spot_cost", "currency"}
MEMORY = {"parameters", "gradients", "optimizer", "gathered", "activations", "logits", "buffers"}


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_layout_of_the_command_line(
    capsys: pytest.CaptureFixture[str], composer: Composer
) -> None:
    named = ["parallel=zero3", "launch.tasks_per_node=8", "hardware=h100_sxm", "--nodes", "1"]
    named += ["launch.spares=1"]  # paid for, but without ranks
    found = plan(capsys, *LM, *named, "--budget", "1e9tokens")
    assert found["model"]["parameters"] == 1_328_256
    assert found["model"]["embedding"] == 4096 * 128
    assert found["model"]["flops_per_sample"] == 256 * found["model"]["flops_per_token"]
    assert found.keys() >= {"model", "layouts", "hardware", "assumptions"}
    numbers = {"parameters", "trainable", "embedding", "active", "flops_per_sample"}
    assert found["model"].keys() == numbers | {"flops_per_token"}
    first, *others = found["layouts"]
    times = {"step_s", "samples_per_s", "tokens_per_s_per_gpu", "mfu", "bubble", "comm_s"}
    words = {"layout", "overrides", "ranks", "nodes", "fits", "memory", "reason", "exposed_comm_s"}
    assert first.keys() == times | words | BILL | {"tight", "compared", "gpu_compared"}
    assert (first["ranks"], first["nodes"], first["fits"], first["tight"]) == (8, 1, True, False)
    assert first["memory"].keys() == MEMORY | {"allowance", "total", "host"}
    assert first["memory"]["parameters"] == 1_328_256 * 4 // 8
    assert first["memory"]["optimizer"] == 1_328_256 * 8 // 8
    assert first["samples_per_s"] == pytest.approx(64 / first["step_s"])
    steps = -(-1_000_000_000 // (256 * 64))
    assert first["gpu_hours"] == pytest.approx(steps * first["step_s"] * 16 / 3600)
    assert first["kwh"] == pytest.approx(first["gpu_hours"] * 0.7 / 2)
    assert first["cost"] == pytest.approx(first["gpu_hours"] * 3)
    assert first["spot_cost"] == pytest.approx(first["gpu_hours"] * 2.91)
    assert (first["currency"], first["hours"]) == ("USD", first["gpu_hours"] / 16)
    assert others[0]["overrides"][:2] == ["launch.nodes=1", "launch.tasks_per_node=8"]
    for entry in others:  # the ready command line is the layout
        config = composer.typed(["experiment=digits", *named[:2], *entry["overrides"]])
        assert Layout(config, 1, ()).ranks == 8
        assert Layout(config, 1, ()).kind == entry["layout"]
    # What was compared with nothing published stands where it would with steps 15 % longer.
    assert {entry["compared"] for entry in others} == {True, False}
    steps = [entry["step_s"] * (1 if entry["compared"] else 1.15) for entry in others]
    assert steps == sorted(steps)
    told = "no published run with cp+tp or offload or zero2 was compared; such layouts are"
    assert found["assumptions"]["* behind a layout"].startswith(told)


def test_the_cheapest_kind_is_first_and_what_does_not_fit_has_a_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table of kinds, in `--json`, and where the hardware is named.

    What no published run covers has no rank among what is covered.
    """
    kinds = {name: load(name) for name in ("mi300x", "h100_pcie", "l40s", "rtx_4090")}
    kinds["l40s"] = replace(kinds["l40s"], memory_bytes=2**30)
    monkeypatch.setattr("hpctrain.insight.plan.plan_command.known", lambda *_: [*kinds])
    monkeypatch.setattr("hpctrain.insight.plan.plan_command.load", lambda name, *_: kinds[name])
    words = ["experiment=digits", "data=null", "--sample-shape", "64", "--budget", "1e12samples"]
    words += ["train.global_batch_size=8", "model.hidden=[64]"]
    found = plan(capsys, *words)["hardware"]
    assert [one["name"] for one in found] == ["rtx_4090", "h100_pcie", "mi300x", "l40s"]
    assert [one.get("gpu_compared") for one in found] == [True, True, False, None]
    costs = {one["name"]: one["cost"] for one in found if one["fits"]}
    assert costs["mi300x"] < costs["h100_pcie"]
    assert costs["rtx_4090"] < costs["h100_pcie"]
    small = found[-1]
    assert (small["name"], small["fits"]) == ("l40s", False)
    assert re.search(r"needs .* GiB of 1.0 GiB per GPU, also with ", small["reason"])
    assert small["reason"].endswith("; train.global_batch_size=8 is too small for more")
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not possible on l40s: " + small["reason"] in text
    assert "the first of the known GPUs: " in text
    assert re.search(r" mi300x \* .* behind a GPU: its speed is assumed, for no published", text)


def test_what_offload_keeps_on_the_host_has_to_fit_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bytes for each parameter, and pinned memory is rounded up to powers of two."""
    monkeypatch.setattr(
        "hpctrain.insight.plan.plan_command.known", lambda *_: []
    )  # they take seconds
    words = [*LM, "model.layers=2", "parallel=offload", "launch.tasks_per_node=2"]
    words += ["hardware=rtx_4090"]
    found = plan(capsys, *words, "launch.mem_gb=0.01", code=8)
    exact, memory = found["model"]["parameters"] * 16 // 2, found["layouts"][0]["memory"]
    assert found["layouts"][0]["fits"] is False
    assert exact < memory["host"] < 1.5 * exact
    assert memory["total"] < 3 * 2**30
    assert main([*words, "launch.mem_gb=1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"each keeps {2 * memory['host'] / 2**20:.1f} MiB in the host memory of each" in text
    assert "host_link 2.52e+10" in text  # 80 % of PCIe 4 x16


def test_a_format_that_the_gpu_does_not_have_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*LM, "model.layers=2", "precision=fp8", "hardware=a100_80", "--nodes", "1"]
    found = plan(capsys, *words)  # no layout is named
    assert [text[:61] for text in found["warnings"]] == [
        "precision.compute=fp8: hardware=a100_80 has no peak for it (N"
    ]
    assert {entry["step_s"] for entry in found["layouts"]} == {None}


def test_experts_have_activations_and_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    moe = ["model=moe_small", "model.layers=2", "model.tied=false", *LM[1:]]
    found = plan(capsys, *moe, "hardware=h100_sxm", "--nodes", "1,2")
    assert found["model"]["active"] < found["model"]["parameters"]
    kinds = {tuple(w for w in e["overrides"] if "parallel" in w): e for e in found["layouts"]}
    divided = {
        key: next(e for words, e in kinds.items() if any(key in word for word in words))
        for key in ("parallel.cp=2", "parallel.ep=4", "parallel.fsdp.offload=true")
    }
    for entry in divided.values():
        assert entry["fits"] is True
        assert entry["memory"]["activations"] > 0
    plain = next(entry for words, entry in kinds.items() if not words)  # ddp
    assert divided["parallel.fsdp.offload=true"]["step_s"] > plain["step_s"]
    words = [set(entry["overrides"]) for entry in found["layouts"]]
    for both in ({"parallel.pp=2", "parallel.cp=2"}, {"parallel.pp=2", "parallel.ep=4"}):
        assert any(both < entry for entry in words), both


def test_context_parallel_divides_parameters_only_with_dp_shard() -> None:
    config, sizes = Config(), ModelSizes((((1000,),),) * 4, ())
    config.parallel.zero = 3
    assert memory_of(sizes, Degrees(cp=2), config).parameters == 4 * 4000
    assert memory_of(sizes, Degrees(dp_shard=2, cp=2), config).parameters == 4 * 1000


class NeedsValues(nn.Module):
    """A model that decides by a value, which only tensors with values have."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, rows)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.table(tokens) @ self.table.weight.T * (1 + int(tokens[0, 0] > 5))


def measured(build: Callable[[], nn.Module]) -> Activations:
    sample = {
        "tokens": torch.empty((1, 257), dtype=torch.int64, device="meta"),
        "mask": torch.empty(1, dtype=torch.bool, device="meta"),
    }
    return MeasuredActivations(build, LanguageModel(), sample, None)["none"]


class BuiltWithValues(nn.Module):
    """A model that reads values of the CPU while it is built, as those of timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0, 1, 3, device="cpu")[1].item()
        self.table, self.head = nn.Embedding(1024, 8), nn.Linear(8, 1024, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.table(tokens) * self.scale)


def test_a_model_that_is_built_with_values_of_the_cpu() -> None:
    found = measured(BuiltWithValues)
    assert found.exact
    assert found.outside > 256 * 1024 * 4


@pytest.mark.slow
def test_what_is_unknown_is_exit_code_10(capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"+model._target_={__name__}.NeedsValues", *LM[1:], "hardware=h100_sxm"]
    named = ["--nodes", "1", "parallel=ddp", "launch.tasks_per_node=1"]
    first = plan(capsys, *words, *named, code=10)["layouts"][0]
    assert first["fits"] is None
    assert first["memory"]["activations"] is first["memory"]["logits"] is None
    assert main([*words, *named]) == 10
    text = capsys.readouterr().out
    assert "parameters may fit on 1 x NVIDIA H100 SXM 80 GB" in text
    assert main([*words, "parallel=ddp"]) == 10  # with the table of all kinds
    assert "unknown USD" not in capsys.readouterr().out
    first = plan(capsys, *words, *named, "hardware.memory_gib=0.5", code=8)["layouts"][0]
    assert first["fits"] is False  # what is known is too much already


def test_frozen_parameters_have_neither_gradients_nor_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train.lora.match=[layers.*.mlp.up]", "train.lora.rank=4", "parallel=zero3"]
    words += ["launch.tasks_per_node=2", "--nodes", "1"]
    found = plan(capsys, *LM, *words, "checkpoint.init_from=.", "hardware=h100_sxm")
    model, memory = found["model"], found["layouts"][0]["memory"]
    assert found["assumptions"]["margin"].startswith("what fits leaves 20% of the GPU's memory")
    assert model["trainable"] == 4 * 4 * (128 + 352)
    assert memory["parameters"] == 4 * model["parameters"] // 2
    assert memory["gradients"] == 4 * model["trainable"] // 2
    assert memory["optimizer"] == 8 * model["trainable"] // 2


def test_a_data_set_tells_its_sample_and_its_epochs(
    capsys: pytest.CaptureFixture[str], digits: Path, tmp_path: Path
) -> None:
    words = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}"]
    words += ["hardware=h100_sxm", "precision=bf16", "--nodes", "1", "--budget", "2epochs"]
    found = plan(capsys, *words)
    assert found["model"]["parameters"] == 85_002
    assert found["layouts"][0]["steps"] == 45  # 2 x 1,438 samples, 64 in a step
    assert plan(capsys, *words, "data.subset=0:640")["layouts"][0]["steps"] == 20
    both = f"data.mixture=[{{name: a, path: {digits}}}, {{name: b, path: {digits}, split: val}}]"
    assert plan(capsys, *words, both, "data.subset=0:320")["layouts"][0]["steps"] == 20
    shutil.copy(digits / "index.json", tmp_path)  # no shard is read
    assert plan(capsys, *words, f"data.path={tmp_path}")["layouts"][0]["steps"] == 45
    with pytest.raises(ConfigError, match=r"^hardware\.storage_mb_per_s has left hpctrain: `bench"):
        main([*words, "+hardware.storage_mb_per_s=1e9"])


def test_without_hardware_the_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LM, "--nodes", "1"]) == 0
    text = capsys.readouterr().out
    assert "parameters: 1,328,256" in text
    assert "activations" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model=lm_small"], "data: without a data set --sample-shape stands for it"),
        (["hardware=h100_sxm"], "model is missing: give model=NAME, or choose an experiment="),
        (["model=nosuch"], "model=nosuch: no such choice; there are: convnet"),
        ([*LM, "train.global_batch_size=0"], "train.global_batch_size=0: it must be at least 1"),
        (
            [*LM, "hardware=h100_sxm", "launch.tasks_per_node=16", "--nodes", "1"],
            "launch.tasks_per_node=16: a node of hardware=h100_sxm has 8 GPUs, and each rank",
        ),
        ([*LM, "--nodes", "two"], "--nodes=two: it must be numbers of nodes"),
        ([*LM, "--budget", "300e9"], "--budget=300e9: it must be a number with a unit"),
        ([*LM, "--budget", "3epochs"], "the length of an epoch is unknown"),
        ([*LM, "hardware=v100"], "known are a100_40, a100_64"),
        ([*LM, "parallel.tp=3", "launch.tasks_per_node=3"], "parallel.tp=3 does not divide"),
        ([*LM, "parallel.tp=2"], "the job has 1 nodes x 1 tasks"),
        ([*LM[:1], "--sample-shape", "3by4"], "--sample-shape=3by4: it must be numbers"),
        ([*LM[:1], "--sample-shape", ""], "--sample-shape=: it must be numbers"),
        ([*LM, "+model.typo=1"], "typo"),
        (
            ["model=convnet", "--sample-shape", "8x8"],
            "with a sample of image 8x8, label one number fails at",
        ),
        ([*LM, "hardware=h100_sxm", "hardware.price.own='3'"], "hardware.price.own=3: a price is"),
        ([*LM, "hardware=h100_sxm", "hardware.attention_efficiency=2"], "at most 1"),
        ([*LM, "data.path=nowhere"][3:] + LM[:1], "nowhere"),
    ],
)
def test_bad_input(words: list[str], text: str) -> None:
    with pytest.raises(HpctrainError) as caught:
        main([*words, "--json"])
    assert text in str(caught.value)
    assert caught.value.exit_code in (2, 3)


@pytest.mark.slow
def test_a_missing_figure_leaves_out_what_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hardware=h100_sxm", "hardware.memory_gb_per_s=null", "hardware.price=null"]
    found = plan(capsys, *LM, *words, "--nodes", "1")
    assert found["layouts"][0]["fits"] is True
    assert {found["layouts"][0][key] for key in ("step_s", "mfu", "cost", "kwh")} == {None}
    assert found["assumptions"]["unknown"] == "memory_gb_per_s, price"


def test_a_model_that_needs_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
    code += "        super().__init__()\n        self.n = int(torch.ones(3).sum())\n"
    (tmp_path / "needs_values.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs_values\.py\", line 5") as caught:
        main(["+model._target_=needs_values.Net", "--sample-shape", "3x8x8", "--json"])
    assert "plan builds the model without memory" in str(caught.value)


def test_budgets() -> None:
    config = Config()
    config.train.global_batch_size, config.train.max_steps = 10, 7
    assert budget_of(None, config.train, 0, None) == Budget(7, "train.max_steps=7")
    steps = {"2e3tokens": 20, "95samples": 10, "12steps": 12, "2epochs": 10}
    assert {t: budget_of(t, config.train, 10, 50).steps for t in steps} == steps


def test_collectives() -> None:
    hardware = load("h100_sxm")
    inside = link_of(hardware, 8, 1, 8)
    assert inside == hardware.inside
    assert gather_s(8e9, 8, inside) == pytest.approx(3 * 4e-6 + 7e9 / (450e9 * 0.8))
    assert gather_s(8e9, 1, inside) == 0
    assert link_of(hardware, 8, 1, 16).bandwidth == 400e9  # eight GPUs of a node send together
    assert link_of(hardware, 8, 8, 2) == hardware.between
    assert gather_s(2e9, 2, hardware.between) == pytest.approx(10e-6 + 1e9 / 40e9)
    assert gather_s(1e9, 4, load("cpu").inside) == math.inf
