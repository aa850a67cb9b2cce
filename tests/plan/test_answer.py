"""Tests of `plan`: the answer as a whole, and what it says where something is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.hardware import load
from hpctrain.plan.budget import Budget, budget_of
from hpctrain.plan.layouts import Layout
from hpctrain.plan.plan_command import main
from hpctrain.plan.predicting.link_times import gather_s, link_of, send_s
from hpctrain.plan.ranking import WHY

LM = ["model=lm_small", "--sample-shape", "257", "train.global_batch_size=64", "precision=bf16"]
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
    first, *others = found["layouts"]
    assert (first["ranks"], first["nodes"], first["fits"]) == (8, 1, True)
    assert first["memory"].keys() == MEMORY | {"allowance", "total"}
    assert first["memory"]["parameters"] == 1_328_256 * 4 // 8
    assert first["memory"]["optimizer"] == 1_328_256 * 8 // 8
    assert first["samples_per_s"] == pytest.approx(64 / first["step_s"])
    steps = -(-1_000_000_000 // (256 * 64))
    assert first["gpu_hours"] == pytest.approx(steps * first["step_s"] * 8 / 3600)
    assert first["kwh"] == pytest.approx(first["gpu_hours"] * 0.7)
    assert first["cost"] == pytest.approx(first["gpu_hours"] * 3)
    assert others[0]["overrides"][:2] == ["launch.nodes=1", "launch.tasks_per_node=8"]
    assert all(entry["reason"] for entry in others)
    for entry in others:  # the ready command line is the layout
        config = composer.typed(["experiment=digits", *named[:2], *entry["overrides"]])
        assert Layout(config, 1, ()).ranks == 8
        kind = Layout(config, 1, ()).kind.partition("+")[0]
        assert entry["reason"].startswith(WHY.get(kind, "tensor parallel")), kind
    assert [entry["step_s"] for entry in others] == sorted(entry["step_s"] for entry in others)


def test_what_does_not_fit_is_exit_code_8(capsys: pytest.CaptureFixture[str]) -> None:
    named = [
        "hardware=rtx_4090",
        "parallel=ddp",
        "launch.tasks_per_node=4",
        "hardware.memory_gib=1",
    ]
    found = plan(capsys, *LM, *named, "--nodes", "1", "model.layers=60", code=8)
    assert found["layouts"][0]["fits"] is False


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
        ([*LM, "--budget", "3epochs"], "the length of an epoch is unknown"),
        ([*LM, "hardware=v100"], "hardware=v100: no such choice; there are: a100_40"),
        ([*LM, "parallel.tp=3", "launch.tasks_per_node=3"], "parallel.tp=3 does not divide"),
        ([*LM, "parallel.tp=2"], "the job has 1 nodes x 1 tasks"),
        ([*LM[:1], "--sample-shape", "3by4"], "--sample-shape=3by4: it must be numbers"),
        ([*LM, "+model.typo=1"], "typo"),
    ],
)
def test_bad_input(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main([*words, "--json"])
    assert text in str(caught.value)


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
    assert budget_of(None, config, 0, None) == Budget(7, "train.max_steps=7")
    steps = {"2e3tokens": 20, "95samples": 10, "12steps": 12, "2epochs": 10}
    assert {t: budget_of(t, config, 10, 50).steps for t in steps} == steps


def test_collectives() -> None:
    hardware = load("h100_sxm")
    inside = link_of(hardware, 8, 1, 8)
    assert inside == hardware.inside
    assert gather_s(8e9, 8, inside) == pytest.approx(3 * 4e-6 + 7e9 / (450e9 * 0.8))
    assert gather_s(8e9, 1, inside) == 0
    assert link_of(hardware, 8, 1, 16).bandwidth == 400e9  # eight GPUs of a node send together
    assert link_of(hardware, 8, 8, 2) == hardware.between
    assert send_s(1e9, hardware.between) == pytest.approx(10e-6 + 1e9 / 40e9)
    assert gather_s(1e9, 4, load("cpu").inside) is None
