"""Adapters beside weights in 4 bits, computed by bitsandbytes on the CPU.

On a CPU bitsandbytes computes with the same codes and scales as on a GPU, but with other kernels.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hpctrain import load_run
from hpctrain.addons.quantized import (
    FourBitLinear,
    _functional,
    _packed,
    packed_bytes,
    quantize,
    rounded,
)
from hpctrain.engine.checkpoint.saved_state import plain_name
from hpctrain.engine.checkpoint.tensor_reader import TensorReader
from hpctrain.engine.layers.lora import add_adapters, freeze_base
from hpctrain.errors import ConfigError
from hpctrain.models import MLP
from hpctrain.results.commands.export import main as export
from tests.conftest import Completed, run_json, runs
from tests.parallel.parity import Cell, Result, build
from tests.parallel.test_lora import LORA, journal_result
from tests.ranks import run_ranks

Train = Callable[..., Completed]
pytestmark = pytest.mark.slow
WHY = "bitsandbytes is not installed: pip install 'hpctrain[qlora]'"
QUICK = ("monitor.enabled=false", "tracking=off", "train.max_steps=6", "checkpoint.every_steps=2")


@pytest.fixture(autouse=True)
def bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes", reason=WHY)


def pair(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return a quantized model, and one whose weights are those that 4 bits can have."""
    torch.manual_seed(0)
    model = MLP(64, [96, 128], 10).to(dtype)
    add_adapters(model, ["[13]"], 4, 8.0)
    freeze_base(model)
    for name in ("1", "3"):
        nn.init.normal_(model.get_submodule(name).lora_B)  # type: ignore[arg-type]
    other = deepcopy(model)
    quantize(model)
    for name in ("1", "3"):
        layer = other.get_submodule(name)
        layer.weight.data = rounded(layer.weight.data)  # type: ignore[union-attr, operator, arg-type]
    return model, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_with_rounded_weights(dtype: torch.dtype) -> None:
    model, other = pair(dtype)
    layer = model.get_submodule("1")
    assert isinstance(layer, FourBitLinear)
    assert (layer.weight.dtype, layer.weight.numel()) == (torch.uint8, 64 * 96 // 2)
    error = (rounded(torch.randn(128, 256)) - torch.randn(128, 256)).abs().mean()
    assert error > 0
    x = torch.randn(7, 64, dtype=dtype)
    results = []
    for each in (model, other):
        given = x.clone().requires_grad_()
        out = each(given)
        out.float().pow(2).sum().backward()
        grads = [p.grad for p in each.parameters() if p.requires_grad]
        results.append([out, given.grad, *grads])
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, expected = (each.get_submodule("1")(x) for each in (model, other))
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(hidden, expected, rtol=3e-2, atol=3e-2)


def test_the_bytes_of_a_packed_weight() -> None:
    for shape in ((96, 64), (130, 514), (1024, 1000)):
        packed, state = _packed(_functional(), torch.randn(shape))
        tables = state.code.nbytes + state.state2.code.nbytes + state.offset.nbytes
        own = [packed, state.absmax, state.state2.absmax]
        assert packed_bytes(shape[0] * shape[1]) == sum(value.nbytes for value in own)
        assert tables < 2048, "the same for every size"


def test_what_cannot_be_quantized() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Own(64, 64))
    add_adapters(model, ["0"], 4, 8.0)
    with pytest.raises(ConfigError, match="0 is a Own, which computes"):
        quantize(model)


def trained(made: Cell) -> Result:
    training = build(made)
    quantize(training.model.module)
    training.run(made, made.steps)
    named = training.model.module.named_parameters()
    moved = {plain_name(name): p.detach().clone() for name, p in named if p.requires_grad}
    return Result(training.losses, training.norms, moved)


def test_two_ranks_train_as_one() -> None:
    keys = tuple(LORA.items())
    (one,) = run_ranks(trained, 1, Cell("untied", 1, keys))
    for two in run_ranks(trained, 2, Cell("untied", 2, keys)):
        assert two.losses == pytest.approx(one.losses, rel=1e-5)
        assert two.norms == pytest.approx(one.norms, rel=1e-5)
        assert two.parameters.keys() == one.parameters.keys() != set()
        for name, value in one.parameters.items():
            torch.testing.assert_close(two.parameters[name], value, rtol=1e-4, atol=1e-6)


def test_a_run_is_resumed_evaluated_and_merged(train: Train, digits: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    (tmp_path / "base").mkdir()
    start = MLP(64, [256, 256], 10)
    save_file(start.state_dict(), tmp_path / "base" / "model.safetensors")
    lora = "train.lora={match: '[13]', rank: 4, alpha: 8, also: ['5.*'], quantize: nf4}"
    given = (*QUICK, lora, f"checkpoint.init_from={tmp_path}/base")
    train(*given)
    (run,) = runs(tmp_path / "runs")
    last = run / "checkpoints" / "step-00000006"
    saved = {n.removeprefix("model.") for n in TensorReader(last).saved if n.startswith("model.")}
    assert saved == {f"{n}.lora_{x}" for n in (1, 3) for x in "AB"} | {"5.weight", "5.bias"}
    # Resumed from the middle, the run ends with the same bits.
    expected = journal_result(run)
    last.rename(tmp_path / last.name)
    (run / "run.json").write_text(json.dumps(run_json(run) | {"state": "interrupted"}))
    train(*given)
    assert journal_result(run) == expected

    model = load_run(run).model()
    assert isinstance(model.get_submodule("1"), FourBitLinear)
    loaded = load_run(run)
    assert loaded.evaluate()["loss"] == pytest.approx(loaded.result["val/loss"], rel=1e-5)
    export([str(run), str(tmp_path / "out"), "--merge"])
    merged = load_file(tmp_path / "out" / "model.safetensors")
    layer = model.get_submodule("1")
    change = layer.change()  # type: ignore[operator]
    torch.testing.assert_close(merged["1.weight"], rounded(start[1].weight) + change)
    whole = MLP(64, [256, 256], 10)
    whole.load_state_dict(merged)
    x = torch.rand(5, 64)
    torch.testing.assert_close(whole(x), model(x), rtol=1e-4, atol=1e-5)
