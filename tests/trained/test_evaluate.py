"""Evaluations and predictions of a finished run: those of the training, in any layout."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from hpctrain import load_run
from hpctrain.base.terminal import progress_bar
from hpctrain.config.schema import Config
from hpctrain.engine.parallel import recipe
from hpctrain.errors import ConfigError, StorageError
from hpctrain.results import predictor, trained_model
from hpctrain.results.fitting_layout import fit_layout
from hpctrain.results.loaded import LoadedRun
from hpctrain.runs import chosen_checkpoint
from hpctrain.tasks import Classification
from tests.bounds import EXACT
from tests.conftest import Completed, hpctrain_on, only_run, run_json, run_module, torchrun

Train = Callable[..., Completed]
# In float64, several ranks and one give the same numbers up to 1e-15.
QUICK = ("train.max_steps=4", "monitor.enabled=false", "tracking=off", "precision=fp64")


def predictions(folder: Path, split: str = "val") -> np.ndarray[Any, Any]:
    index = json.loads((folder / "index.json").read_text())
    parts = []
    for shard in index["shards"]:
        assert shard["split"] == split
        with h5py.File(folder / shard["path"]) as file:
            parts.append(file["prediction"][:])
    return np.concatenate(parts)


def validation(loaded: LoadedRun, digits: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the model and the labels of the validation split."""
    index = json.loads((digits / "index.json").read_text())
    scale = loaded.config.task.get("scale", 1.0)
    images, labels = [], []
    for shard in index["shards"]:
        if shard["split"] == "val":
            with h5py.File(digits / shard["path"]) as file:
                images.append(torch.from_numpy(file["image"][:]).double() * scale)
                labels.append(torch.from_numpy(file["label"][:]).long())
    return torch.cat(images), torch.cat(labels)


def logits(run: Path, digits: Path) -> np.ndarray[Any, Any]:
    """Return the logits of the whole model on this process."""
    loaded = load_run(run)
    with torch.no_grad():
        return loaded.model()(validation(loaded, digits)[0]).numpy()  # type: ignore[no-any-return]


def halved(sample: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    return {"image": sample["image"] / 2}


def check_predictions(folder: Path, expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(predictions(folder), expected, rtol=0, atol=EXACT)


def loss_of(model: nn.Module, loaded: LoadedRun, digits: Path) -> float:
    """Return the loss of a whole model on this process, over the validation split."""
    images, labels = validation(loaded, digits)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(images), labels))


def test_an_evaluation_and_predictions_are_those_of_the_training(
    train: Train, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(*QUICK)
    run = only_run(tmp_path)
    loaded = load_run(run)
    expected = {n: v for n, v in run_json(run)["result"].items() if n.startswith("val/")}
    with monkeypatch.context() as context:
        said = list[bool]()  # whether what concerns a training is said
        made = recipe.Setup
        context.setattr(recipe, "Setup", lambda *a: said.append(a[-1].says) or made(*a))
        means = loaded.evaluate()
        assert said == [False]
    assert {f"val/{name}": value for name, value in means.items()} == expected
    with pytest.raises(ConfigError, match="the result would be another one"):
        loaded.evaluate(overrides=["optimizer.lr=1"])
    with monkeypatch.context() as context:  # its digests were verified already
        context.setattr(chosen_checkpoint, "damage", lambda _: pytest.fail("read again"))
        assert loaded.evaluate(step=4) == means
    out = tmp_path / "out"
    monkeypatch.setattr(predictor, "SHARD_SAMPLES", 128)
    loaded.predict(None, out)
    check_predictions(out, logits(run, digits))
    # A sample, which needs no label, becomes what the model takes: scaled, in float64.
    scaled = validation(loaded, digits)[0][:1]
    given = (scaled[0] / loaded.config.task["scale"]).to(torch.uint8).numpy()
    (inputs,) = loaded.inputs({"image": given})
    assert inputs.dtype == torch.float64
    assert torch.equal(inputs, scaled)
    with pytest.raises(ConfigError, match=r"task\.input=image: the data set's fields are picture"):
        loaded.inputs({"picture": given})
    # So are the transforms of an evaluation: a flip, which draws, is none of them.
    of_samples, flip = f"{__name__}.halved", "hpctrain.data.transforms.RandomFlip"
    loaded.config.data.transforms = [{"_target_": of_samples, "_partial_": True}]
    loaded.config.data.batch_transforms = [{"_target_": flip, "p": 1.0}]
    assert torch.equal(loaded.inputs({"image": given})[0], scaled / 2)
    run_module("data_prep", "inspect", str(out), "--verify")
    # A field whose rows change is refused, also between shards.
    counts = iter(range(1, 99))
    with monkeypatch.context() as context:
        context.setattr(
            *(Classification, "predictions"),
            lambda _, x, b: {"x": x[:, : next(counts)]},
            raising=False,
        )
        for size in (128, 65536):
            context.setattr(predictor, "SHARD_SAMPLES", size)
            with pytest.raises(ConfigError, match=r"x: its rows are float64 \(1,\) .* \(2,\) in"):
                loaded.predict(None, tmp_path / f"wide{size}")
            counts = iter(range(1, 99))
    (out / "index.json").unlink()
    with pytest.raises(StorageError, match="has files, as an interrupted prediction leaves them"):
        loaded.predict(None, out)
    with pytest.raises(ConfigError, match="no rank has whole outputs"):
        loaded.predict(None, tmp_path / "x", overrides=["parallel.pp=2"])


def test_predictions_take_the_batches_of_the_split_and_show_how_far_they_are(
    train: Train,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shard has up to 65,536 samples; computing as many for 382 would take 512 batches."""
    train(*QUICK, "train.max_steps=1", "data.val_split=null", "train.global_batch_size=50")
    run = only_run(tmp_path)
    batches = []

    class Counted(predictor._Outputs):
        def __call__(self, model: nn.Module, batch: Any) -> Any:
            batches.append(int(batch["mask"].sum()))
            return super().__call__(model, batch)

    monkeypatch.setattr(predictor, "_Outputs", Counted)
    monkeypatch.setattr(trained_model, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress_bar, "EVERY_S", 0.0)
    capsys.readouterr()
    load_run(run).predict(None, tmp_path / "out", "val")
    assert batches == [100, 100, 100, 82]
    lines = capsys.readouterr().err.splitlines()
    rate = r"[\d.,]+ samples/s, \d+ s left"
    assert re.fullmatch(rf"predicted 100/382 samples, {rate}", lines[0])
    assert lines[-1].startswith("predicted 382/382 samples")
    check_predictions(tmp_path / "out", logits(run, digits))
    load_run(run).evaluate("val")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"evaluated 100/382 samples, {rate}", lines[0])
    assert lines[-1].startswith("evaluated 382/382 samples")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_several_ranks_evaluate_and_predict_as_one(
    layout: str, train: Train, digits: Path, tmp_path: Path
) -> None:
    train(*QUICK)
    run = only_run(tmp_path)
    keys = () if layout == "ddp" else ("parallel.dp_replicate=1", "parallel.dp_shard=-1")

    def on_two(*arguments: str) -> str:
        return torchrun(2, *arguments, *keys, cwd=tmp_path).stdout

    said = on_two("evaluate", run.name, "--json")
    means = json.loads(said.strip().splitlines()[-1])["metrics"]
    for name, value in means.items():
        assert value == pytest.approx(run_json(run)["result"][f"val/{name}"], rel=EXACT)
    # A small split is shared by the ranks.
    on_two("predict", run.name, str(digits), "small")
    check_predictions(tmp_path / "small", logits(run, digits))
    assert len(list((tmp_path / "small").glob("*.h5"))) == 2


@pytest.mark.parametrize(
    ("trained", "ranks", "used"),
    [
        ({"pp": 2, "dp_replicate": 2}, 4, {"dp_shard": 4}),
        ({"cp": 2}, 2, {"dp_shard": 2}),
        ({"tp": 2, "pp": 2, "dp_replicate": 1}, 2, {"dp_shard": 1, "tp": 2}),
        ({"tp": 2}, 3, {"dp_shard": 3}),
        ({"dp_shard": 4, "dp_replicate": 1, "ep": 4}, 2, {"dp_shard": 2}),
        ({"dp_replicate": 4}, 3, {"dp_replicate": 3}),
        ({"dp_replicate": -1}, 3, {"dp_replicate": -1}),  # it fits as it is
    ],
)
def test_the_ranks_that_were_started_decide_the_layout(
    trained: dict[str, int], ranks: int, used: dict[str, int]
) -> None:
    config = Config()
    for name, degree in trained.items():
        setattr(config.parallel, name, degree)
    fitting, _ = fit_layout(config.parallel, ranks, whole_outputs=True)
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    found = {name: getattr(fitting, name) for name in names}
    assert found == dict.fromkeys(names, 1) | used


LM = (
    *("experiment=stdlib_lm", "model.dim=32", "model.layers=2", "model.heads=4"),
    *("model.tied=false", "model.vocab_size=300", "data.windows.length=17"),
    *("train.max_steps=2", "train.global_batch_size=4", "train.log_every=2", "train.eval_every=2"),
    *("monitor.enabled=false", "tracking=off", "precision=fp64"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "in").mkdir()
    for i in range(12):
        (folder / "in" / f"{i}.txt").write_text(
            "".join(f"x{i} = {j * j * i % 97}\n" for j in range(400))
        )
    run_module(
        *("data_prep", "text", str(folder / "in"), str(folder / "data"), "--quiet"),
        *("--train-bpe", "300", "--split", "train=0.5,val=0.5"),
    )
    return folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "cp", "tp"])
def test_a_run_of_any_layout_is_predicted_by_any_number_of_ranks(
    layout: str, text: Path, tmp_path: Path
) -> None:
    shape = [f"parallel.{layout}=2", "parallel.dp_replicate=1"]
    shape += ["train.accumulate=2"] if layout == "pp" else []
    torchrun(2, *LM, f"data.path={text}", "output_dir=runs", *shape, cwd=tmp_path)
    run = only_run(tmp_path)
    trained = run_json(run)["result"]
    found, means = {}, {}
    for ranks in (1, 2, 3):
        out = f"out{ranks}"
        hpctrain_on(ranks, "predict", run.name, str(text), out, cwd=tmp_path)
        found[ranks] = predictions(tmp_path / out)
        run_module("data_prep", "inspect", str(tmp_path / out), "--verify")
        said = hpctrain_on(ranks, "evaluate", run.name, "--json", cwd=tmp_path).stdout
        means[ranks] = json.loads(said.strip().splitlines()[-1])["metrics"]
    assert found[1].shape[1:] == (16, 300)
    assert len(found[1]) > 3 * 8
    # One process has the whole model, and so it is what the others are measured against.
    for ranks in (2, 3):
        np.testing.assert_allclose(found[ranks], found[1], rtol=0, atol=EXACT)
    for measured in means.values():
        for name, value in measured.items():
            assert value == pytest.approx(trained[f"val/{name}"], rel=EXACT)
