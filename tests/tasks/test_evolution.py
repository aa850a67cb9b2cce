"""Fields that evolve: the pairs of snapshots, the errors, and the fitted linear map."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.config.rules.metrics import names as metric_names
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.tasks import Evolution, bind
from hpctrain.tasks.linear_waves import LinearWaves
from tests.bounds import EXACT, within
from tests.conftest import journal_metrics, run_json, run_module, runs


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flow") / "data"
    size = ["--size", "16", "--steps", "4", "--trajectories", "8", "--workers", "1"]
    run_module("data_prep", "sample", "flow", str(folder), *size, "--split", "train=0.5,val=0.5")
    return folder


def batch(rows: int = 3, steps: int = 4) -> dict[str, torch.Tensor]:
    return {
        "vorticity": torch.randn(rows, steps, 8, 8),
        "viscosity": torch.rand(rows),
        "mask": torch.arange(rows) < 2,
    }


def test_snapshots_are_paired_with_those_that_follow() -> None:
    torch.set_default_dtype(torch.float64)
    task, given = Evolution(constants=["viscosity"]), batch()
    (inputs,) = task.inputs(given)
    assert inputs.shape == (9, 2, 8, 8)
    assert torch.equal(inputs[4, 0], given["vorticity"][1, 1])
    assert torch.equal(inputs[4, 1], given["viscosity"][1].expand(8, 8))
    change = (given["vorticity"][:, 1:] - given["vorticity"][:, :-1]).flatten(0, 1).unsqueeze(1)
    with torch.no_grad():
        sums = task.sums(change, given)
        nothing = task.sums(torch.zeros_like(change), given)
    assert sums["loss"][1] == 6
    within([sums["relative_l2"][0].item(), sums["spectral_error"][0].item()], EXACT)
    for name in ("relative_l2", "spectral_error"):
        assert torch.equal(nothing[name][0], sums[f"{name}_persistence"][0])
    first, second = (given["vorticity"][:2, i : i + 3] for i in (0, 1))
    norms = (first - second).flatten(2).norm(dim=2) / second.flatten(2).norm(dim=2)
    assert nothing["relative_l2"][0].item() == pytest.approx(norms.sum().item(), rel=EXACT)
    assert task.shown is not None
    assert torch.equal(task.shown[0][0], given["vorticity"][0, 3])


def test_the_spectral_error_sees_power_and_not_phases() -> None:
    torch.set_default_dtype(torch.float64)
    angle = torch.arange(16) * 2 * math.pi / 16
    wave = torch.stack([(2 * angle).sin(), (2 * angle).cos(), 2 * (2 * angle).sin()])
    fields = wave[:, None, None, :].expand(3, 1, 16, 16)
    error = Evolution()._spectral_error(fields[1:], fields[:1].expand(2, -1, -1, -1))
    assert error.tolist() == pytest.approx([0.0, 3.0], abs=EXACT)


def test_a_linear_process_is_found_exactly() -> None:
    """Two channels that mix and move, at a rate that depends on a constant."""
    draw = torch.Generator().manual_seed(0)
    before = torch.randn(60, 2, 8, 6, generator=draw)
    constants = torch.randn(60, 1, generator=draw)
    moved = before.roll(1, 2) * 0.5 + before.flip(1)
    after = moved + constants.view(-1, 1, 1, 1) * before.roll(2, 3)
    linear = LinearWaves.fit(before[:50], after[:50], constants[:50])
    assert torch.allclose(linear(before[50:], constants[50:]), after[50:], atol=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vorticity": torch.zeros(3, 1, 8, 8)}, "with 2 steps or more"),
        ({"vorticity": torch.zeros(3, 8)}, r"task\.field=vorticity is float32 \(3, 8\)"),
        ({"viscosity": torch.zeros(3, 2)}, r"viscosity is float32 \(3, 2\); it must be one number"),
        ({}, r"the model returned float32 \(9, 2, 8, 8\); the change of task\.field=vorticity"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Evolution(constants=["viscosity"])(torch.nn.Identity(), batch() | change)


def test_the_scales_are_those_of_the_data_and_the_names_are_known(flow: Path) -> None:
    task: Any = bind(Evolution(constants=["viscosity"], fitted=3), flow)
    from hpctrain.data.sources.reader import Reader

    rows = Reader(flow, "train").read(torch.arange(3).numpy())
    given = {name: torch.as_tensor(value) for name, value in rows.items()}
    given["mask"] = torch.ones(3, dtype=torch.bool)
    (inputs,) = task.inputs(given)
    assert inputs[:, 0].std().item() == pytest.approx(1, rel=0.3)
    with torch.no_grad():
        found = task.sums(torch.zeros_like(inputs[:, :1]), given)
    assert found["relative_l2_linear"][0] < found["relative_l2_persistence"][0]
    section = {"_target_": "hpctrain.tasks.Evolution", "constants": ["viscosity"]}
    known = metric_names(Config(task=section)) or ()
    assert [n for n in known if n.startswith("val/")] == [f"val/{name}" for name in found]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["fno", "unet"])
def test_a_surrogate_beats_persistence_and_the_linear_map(model: str, tmp_path: Path) -> None:
    size = ["--size", "32", "--trajectories", "64"]
    run_module("data_prep", "sample", "flow", str(tmp_path / "data" / "flow"), *size)
    small = ["model.widths=[16,32,64]"] if model == "unet" else []
    given = ["experiment=flow", f"model={model}", *small, "train.max_epochs=12"]
    run_module("hpctrain", *given, "tracking.upload=false", cwd=tmp_path, timeout=1500)
    (run,) = runs(tmp_path / "runs")
    found = {name: value for (name, _), value in journal_metrics(run).items()}
    for name in ("val/relative_l2", "val/spectral_error"):
        assert found[name] < found[f"{name}_linear"] < found[f"{name}_persistence"]
    assert run_json(run)["state"] == "finished"
    assert [*run.rglob("prediction*.png")]
