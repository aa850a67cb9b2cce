"""Tests of `plan`: the answer as a whole, and what it says where something is wrong."""

import json
import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config
from hpctrain.console import Console
from hpctrain.doctor import history
from hpctrain.errors import ConfigError, HpctrainError
from hpctrain.hardware import load
from hpctrain.plan.budget import Budget, Limits, budget_of
from hpctrain.plan.inspecting.activations import Activations, activations_of
from hpctrain.plan.layouts import Layout
from hpctrain.plan.loader_rate import loader_rate
from hpctrain.plan.memory import memory_of
from hpctrain.plan.model_sizes import ModelSizes
from hpctrain.plan.plan_command import main
from hpctrain.plan.predicting.estimate import Estimate
from hpctrain.plan.predicting.rank_memory import RankMemory
from hpctrain.plan.predicting.timing import StepTime, gather_s, link_of, send_s
from hpctrain.plan.printing import print_scaling
from hpctrain.plan.ranking import WHY, scaling
from hpctrain.tasks import LanguageModel

LM = ["model=lm_small", "--sample-shape", "257", "train.global_batch_size=64", "precision=bf16"]
BILL = {"hours", "gpu_hours", "kwh", "cost", "spot_cost", "currency"}
MEMORY = {"parameters", "gradients", "optimizer", "gathered", "activations", "logits", "buffers"}


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_layout_of_the_command_line(
    capsys: pytest.CaptureFixture[str], composer: Composer
) -> None:
    named = ["parallel=zero3", "launch.tasks_per_node=8", "hardware=h100_sxm", "--nodes", "1"]
    found = plan(capsys, *LM, *named, "--budget", "1e9tokens")
    assert found["model"]["parameters"] == 1_328_256
    assert found["model"]["embedding"] == 4096 * 128
    assert found["model"]["flops_per_sample"] == 256 * found["model"]["flops_per_token"]
    assert found.keys() >= {"model", "layouts", "hardware", "assumptions", "scaling", "loader"}
    numbers = {"parameters", "trainable", "embedding", "active", "flops_per_sample"}
    assert found["model"].keys() == numbers | {"flops_per_token"}
    first, *others = found["layouts"]
    times = {"step_s", "samples_per_s", "tokens_per_s_per_gpu", "mfu", "bubble", "comm_s"}
    words = {"overrides", "ranks", "nodes", "fits", "memory", "reason", "exposed_comm_s"}
    assert first.keys() == times | words | BILL
    assert (first["ranks"], first["nodes"], first["fits"]) == (8, 1, True)
    assert first["memory"].keys() == MEMORY | {"allowance", "total"}
    assert first["memory"]["parameters"] == 1_328_256 * 4 // 8
    assert first["memory"]["optimizer"] == 1_328_256 * 8 // 8
    assert first["samples_per_s"] == pytest.approx(64 / first["step_s"])
    steps = -(-1_000_000_000 // (256 * 64))
    assert first["gpu_hours"] == pytest.approx(steps * first["step_s"] * 8 / 3600)
    assert first["kwh"] == pytest.approx(first["gpu_hours"] * 0.7)
    assert first["cost"] == pytest.approx(first["gpu_hours"] * 3)
    assert first["spot_cost"] == pytest.approx(first["gpu_hours"] * 2.91)
    assert (first["currency"], first["hours"]) == ("USD", first["gpu_hours"] / 8)
    assert others[0]["overrides"][:2] == ["launch.nodes=1", "launch.tasks_per_node=8"]
    assert all(entry["reason"] for entry in others)
    for entry in others:  # the ready command line is the layout
        config = composer.typed(["experiment=digits", *named[:2], *entry["overrides"]])
        assert Layout(config, 1, ()).ranks == 8
        kind = Layout(config, 1, ()).kind.partition("+")[0]
        divided = ("tensor parallel", "context parallel")
        assert entry["reason"].startswith(WHY.get(kind, divided)), kind
    assert [entry["step_s"] for entry in others] == sorted(entry["step_s"] for entry in others)


def test_what_a_run_may_cost_and_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the cost, on demand and spot; what is over a limit is left out, and named."""
    words = [*LM, "parallel=zero3", "launch.tasks_per_node=8", "--budget", "1e12tokens"]
    words += ["--nodes", "1", "hardware=h100_sxm"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--max-cost", "950 USD"]) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert "; a GPU-hour: 3 USD on demand, 2.91 USD spot, 2026-05 " in flat
    table = text[text.index("layout ") :].splitlines()
    table = table[: table.index("")]
    heads = ["layout", "ranks", "memory", "step", "tok/s/GPU", "MFU", "hours", "cost", "spot"]
    assert table[0].split() == heads
    assert table[1].startswith("zero3, as given ")  # two rows of one name would not be told apart
    assert len({row.split("  ")[0] for row in table[1:]}) == len(table) - 1 > 2
    assert all(float(row.split()[-2]) <= 950 for row in table[1:])
    assert max(map(len, table)) <= 84
    assert re.search(r"excluded: zero3\+tp2 on 8 ranks: takes 9\d\d USD \(--max-cost 950\)", flat)
    assert re.search(r"zero3, as given, 8: .* It takes .* kWh, 9\d\d USD, spot 9\d\d USD ", flat)

    # A command is one line in a terminal of any width, so that it can be copied.
    assert re.search(r"\n  python -m hpctrain -m .{80,}\n", text)


def test_only_a_limit_that_is_passed_is_named() -> None:
    limits = Limits(hours=0.5, cost=17.45)
    assert limits.exceeded(0.4, 17.0, "USD") == ""
    assert limits.exceeded(0.4, 21.0, "USD") == "takes 21.0 USD (--max-cost 17.45)"
    assert limits.exceeded(0.72, 17.0, "USD") == "takes 0.72 hours (--deadline 0.5)"
    assert Limits(hours=0.5, cost=17.4).exceeded(None, 17.42, "USD") == (
        "takes unknown hours (--deadline 0.5) and 17.42 USD (--max-cost 17.4)"
    )


@pytest.mark.slow
def test_every_kind_of_gpu_meets_the_deadline_or_is_not_possible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model=llama3_8b", "--sample-shape", "8193", "precision=bf16", "--budget", "1e9tokens"]
    assert main([*words, "train.global_batch_size=128", "--deadline", "6h"]) == 0
    text = capsys.readouterr().out
    assert "one GPU alone would need 8.3 TiB, more than any has" in text
    table = text[text.index("of each kind, in USD") :].splitlines()[1:12]
    assert all("not possible" in line or float(line.split()[3]) <= 6 for line in table[1:])
    assert max(map(len, table)) <= 84
    assert not re.search(r"\d{5,}(\.\d+)? .iB", text)
    named = ["hardware=h100_sxm", "parallel=zero3", "launch.tasks_per_node=8"]
    assert main([*words, *named, "train.global_batch_size=128", "--deadline", "1h"]) == 8
    assert re.search(r"it takes [345]\.\d hours \(--deadline 1\)", capsys.readouterr().out)


def test_more_than_all_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """On more nodes each GPU holds less, so that a faster layout has room."""
    config, layouts = Config(), []
    for nodes, kind, step in ((1, 3, 4.0), (2, 1, 1.0)):
        changed = deepcopy(config)
        changed.parallel.dp_replicate, changed.parallel.dp_shard = 1, -1
        changed.parallel.zero, changed.launch.tasks_per_node = kind, 8
        time = StepTime(step, step, 0, 0, 0, 0, 0.5)
        memory = RankMemory(0, 0, 0, 0, 0, 0, 0, 0, 1)
        layout = Layout(changed, nodes, ())
        layouts.append(Estimate(layout, memory, True, time, None, None, None, None, 0))
    print_scaling(Console(width=200), scaling(layouts))
    text = capsys.readouterr().out
    assert "200.0%" in text
    assert "more than 100%: zero1 (1 micro-batch, activation checkpointing none) has room" in text


def test_what_does_not_fit_is_exit_code_8(capsys: pytest.CaptureFixture[str]) -> None:
    named = [
        "hardware=rtx_4090",
        "parallel=ddp",
        "launch.tasks_per_node=4",
        "hardware.memory_gib=1",
    ]
    found = plan(capsys, *LM, *named, "--nodes", "1", "model.layers=60", code=8)
    assert found["layouts"][0]["fits"] is False


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
    assert "a pipeline is looked at across nodes" in found["assumptions"]["excluded"]["pp"]
    one, two = found["scaling"]
    assert (one["nodes"], two["nodes"], one["efficiency"]) == (1, 2, 1)
    rates = [row["samples_per_s"] / row["ranks"] for row in (one, two)]
    assert two["efficiency"] == pytest.approx(rates[1] / rates[0])
    assert found["loader"]["needed_mb_per_s"] is None


def test_context_parallel_divides_parameters_only_with_dp_shard() -> None:
    config, sizes = Config(), ModelSizes.counted(1000, 4, 0)
    config.parallel.zero = 3

    def parameters(degrees: Degrees) -> int:
        parallel, precision = config.parallel, config.precision
        return memory_of(sizes, degrees, parallel, precision, config.optimizer).parameters

    assert parameters(Degrees(cp=2)) == 4 * 4000
    assert parameters(Degrees(dp_shard=2, cp=2)) == 4 * 1000


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
    return activations_of(build, LanguageModel(), sample, None, Config().train)


def test_a_model_that_decides_by_values_is_called_with_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measured(NeedsValues)
    assert found.exact
    assert found.kept > 256 * 1024 * 4
    monkeypatch.setattr("hpctrain.plan.inspecting.activations._MOST_FLOPS", 1)
    assert not measured(NeedsValues).exact


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
def test_what_is_unknown_is_exit_code_10(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"+model._target_={__name__}.NeedsValues", *LM[1:], "hardware=h100_sxm"]
    named = ["--nodes", "1", "parallel=ddp", "launch.tasks_per_node=1"]
    monkeypatch.setattr("hpctrain.plan.inspecting.activations._MOST_FLOPS", 1)
    first = plan(capsys, *words, *named, code=10)["layouts"][0]
    assert first["fits"] is None
    assert first["memory"]["activations"] is first["memory"]["logits"] is None
    assert main([*words, *named]) == 10
    text = capsys.readouterr().out
    assert "whether it fits into NVIDIA H100 SXM 80 GB is unknown" in text
    assert main([*words, "parallel=ddp"]) == 10  # with the table of all kinds
    assert "unknown USD" not in capsys.readouterr().out
    first = plan(capsys, *words, *named, "hardware.memory_gib=0.5", code=8)["layouts"][0]
    assert first["fits"] is False  # what is known is too much already


def test_frozen_parameters_have_neither_gradients_nor_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train.lora.match=[layers.*.mlp.up]", "train.lora.rank=4", "parallel=zero3"]
    words += ["launch.tasks_per_node=2", "--nodes", "1"]
    found = plan(capsys, *LM, *words, "checkpoint.init_from=.")
    model, memory = found["model"], found["layouts"][0]["memory"]
    assert model["trainable"] == 4 * 4 * (128 + 352)
    assert memory["parameters"] == 4 * model["parameters"] // 2
    assert memory["gradients"] == 4 * model["trainable"] // 2
    assert memory["optimizer"] == 8 * model["trainable"] // 2


def test_the_loader_against_the_storage(
    capsys: pytest.CaptureFixture[str], composer: Composer, digits: Path, tmp_path: Path
) -> None:
    words = ["experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}"]
    words += ["hardware=h100_sxm", "precision=bf16", "--nodes", "1"]
    figures = {"node1": {"read_mb_s": 1e9}}
    history.add(str(tmp_path), "doctor", {"node1": []}, figures)
    measured = plan(capsys, *words)["loader"]
    assert measured["bytes_per_sample"] >= 64 + 8
    assert measured["needed_mb_per_s"] > 0
    assert measured["enough"] is True
    assert measured["source"] == "doctor, one process on each of 1 host"
    config = composer.typed(words[:-2])
    slow = replace(load("h100_sxm"), storage_rate=1e3)
    assert loader_rate(config.data, config.output_dir, slow).storage == 1e3
    config.output_dir = str(tmp_path / "other")
    unknown = loader_rate(config.data, config.output_dir, load("h100_sxm"))
    assert (unknown.storage, unknown.source) == (None, "unknown")


def test_without_hardware_the_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LM, "--layers", "--nodes", "1"]) == 0
    text = capsys.readouterr().out
    assert "1,328,256 parameters" in text
    assert "layers.3.mlp.down" in text
    assert "activations" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model=lm_small"], "data: without a data set --sample-shape stands for it"),
        ([*LM, "--nodes", "two"], "--nodes=two: it must be numbers of nodes"),
        ([*LM, "--budget", "300e9"], "--budget=300e9: it must be a number with a unit"),
        ([*LM, "--deadline", "soon"], "--deadline=soon: it must be a time such as 90min"),
        ([*LM, "--max-cost", "0"], "--max-cost=0: it must be an amount such as 500 or 500USD"),
        ([*LM, "--max-cost", "9EUR", "--budget", "9steps", "hardware=l40s"], "price is in USD"),
        ([*LM, "--max-cost", "9", "--budget", "9steps", "hardware=gb300"], "has no price"),
        ([*LM, "--budget", "3epochs"], "the length of an epoch is unknown"),
        ([*LM, "hardware=v100"], "known are a100_40, a100_80"),
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


def test_a_model_that_is_not_installed() -> None:
    with pytest.raises(ConfigError) as caught:
        main([*LM, "model._target_=nosuch.Model"])
    assert str(caught.value) == (
        "model._target_=nosuch.Model: ModuleNotFoundError: No module named 'nosuch'"
    )


@pytest.mark.slow
def test_a_missing_figure_leaves_out_what_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["hardware=h100_sxm", "hardware.memory_gb_per_s=null", "hardware.price=null"]
    found = plan(capsys, *LM, *words, "--nodes", "1")
    assert found["layouts"][0]["fits"] is True
    assert {found["layouts"][0][key] for key in ("step_s", "mfu", "cost", "kwh")} == {None}
    assert found["assumptions"]["unknown memory_gb_per_s"] == "the time of work bound by memory"
    assert found["assumptions"]["unknown price"] == "cost"


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
    assert send_s(1e9, hardware.between) == pytest.approx(10e-6 + 1e9 / 40e9)
    assert gather_s(1e9, 4, load("cpu").inside) == math.inf
