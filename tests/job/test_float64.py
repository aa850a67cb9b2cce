"""`precision=fp64`: a run in float64 from the data to what is exported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpctrain import load_run
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.results.commands.export import main as export
from tests.bounds import EXACT
from tests.conftest import Completed, run_json, runs

Train = Callable[..., Completed]
# A model that is float64 by itself, with buffers, and a task that converts nothing.
MODULE = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
        self.double()

    def forward(self, image):
        bias = torch.zeros(len(image), 10)
        return self.layers(image.flatten(1) * self.scale) + bias


class Task:
    def __init__(self, **_):
        pass

    def __call__(self, model, batch):
        losses = nn.functional.cross_entropy(
            model(batch["image"]), batch["label"].long(), reduction="none"
        )
        assert batch["image"].dtype == losses.dtype == torch.float64
        assert (batch["image"] != batch["image"].float()).any()
        return {"loss": ((losses * batch["mask"]).sum(), batch["mask"].sum())}
"""
# A transform that works in torch's default dtype.
SCALED = "data.batch_transforms=[{_target_: hpctrain.data.transforms.Normalise}]"
OWN = ("model._target_=own.Net", "task._target_=own.Task", "train.max_steps=6", "metric=val/loss")
QUIET = ("tracking=off", "monitor.enabled=false", "train.sync_batchnorm=true")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)  # for `load_run`
    (tmp_path / "own.py").write_text(MODULE)
    return tmp_path


def test_a_model_of_float64_is_refused_by_name_in_another_format(own: Path, train: Train) -> None:
    told = train(*OWN, *QUIET, code=2, PYTHONPATH=str(own)).stderr
    assert "model: its parameter layers.0.weight is float64, but precision.params would" in told
    assert "train it in float32: use precision=fp64" in told


def test_a_run_in_float64_is_that_of_one_process_to_its_end(own: Path, train: Train) -> None:
    layouts = ((1, "one", ()), (2, "two", ("parallel=zero3", "parallel.blocks=[Sequential]")))
    for ranks, name, keys in layouts:
        given = (*OWN, *QUIET, *keys, SCALED, f"name={name}", "precision=fp64")
        train(*given, ranks=ranks, PYTHONPATH=str(own))
    one, two = runs(own / "runs")
    values = [run_json(run)["result"] for run in (one, two)]
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert values[1][name] == pytest.approx(values[0][name], rel=EXACT), name
    assert values[0]["val/loss"] < 2.5
    loaded = load_run(two)
    model = loaded.model()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    assert {value.dtype for value in floats.values()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32, "it is float64 within the run only"
    assert loaded.evaluate()["loss"] == pytest.approx(values[1]["val/loss"], rel=EXACT)
    given = (two.name, str(own / "out"), "--dir", f"{own}/runs")
    assert export([*given]) == 0
    (file,) = (own / "out").glob("*.safetensors")
    exported = load_file(file)
    assert all(torch.equal(exported[name], value) for name, value in floats.items())


def test_float64_is_the_format_of_everything_or_of_nothing(composer: Composer) -> None:
    said = "float64 is the format of everything in a run, or of nothing; use prec"
    for key in ("compute", "params"):
        with pytest.raises(ConfigError, match=said):
            validate(composer.typed(["experiment=digits", f"precision.{key}=fp64"]), 1)
