"""The moving average of adapters: it is right in checkpoints, evaluations and exported weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpctrain import load_run
from hpctrain.config.frozen import dump
from hpctrain.engine.checkpoint.stored_weights import open_weights
from hpctrain.engine.layers.lora import is_adapter
from hpctrain.errors import ConfigError
from hpctrain.models import MLP
from hpctrain.results.commands.export import main as export
from hpctrain.runs.checkpoints.weight_files import WeightFiles
from hpctrain.runs.run_dir import RunDir
from tests.bounds import EXACT
from tests.conftest import Completed, only_run
from tests.trained.test_evaluate import loss_of

Train = Callable[..., Completed]
DECAY = 0.6
QUICK = (
    "monitor.enabled=false",
    "tracking=off",
    "train.max_steps=4",
    "optimizer.lr=1e-2",
    "scheduler.warmup_steps=0",
    "precision=fp64",
)


def stored(checkpoint: Path, part: str = "model") -> dict[str, torch.Tensor]:
    """Return the adapters of a part of a checkpoint."""
    weights = open_weights(WeightFiles(checkpoint, None), part)
    found = {
        n: torch.empty(shape, dtype=torch.float64)
        for n, shape in weights.shapes.items()
        if is_adapter(n)
    }
    weights.load(found)
    return found


@pytest.mark.slow
def test_the_average_of_adapters(train: Train, digits: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    (tmp_path / "base").mkdir()
    save_file(MLP(64, [256, 256], 10).state_dict(), tmp_path / "base" / "model.safetensors")
    lora = "train.lora={match: '[13]', rank: 4, alpha: 8}"
    train(
        *(*QUICK, lora, f"checkpoint.init_from={tmp_path}/base", f"train.ema={DECAY}"),
        *("checkpoint.every_steps=1", "checkpoint.keep=4"),
    )
    run = only_run(tmp_path)
    steps = [run / "checkpoints" / f"step-{n:08d}" for n in (1, 2, 3, 4)]
    average = stored(steps[0], "ema")
    assert len(average) == 4
    for checkpoint in steps[1:]:
        own = stored(checkpoint)
        average = {n: DECAY * value + (1 - DECAY) * own[n] for n, value in average.items()}
        found = stored(checkpoint, "ema")
        for name, value in average.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=EXACT)
    loaded = load_run(run)
    averaged, last = loaded.model(ema=True), loaded.model()
    for name, value in average.items():
        torch.testing.assert_close(averaged.get_parameter(name).data, value, rtol=0, atol=EXACT)
        assert not torch.equal(averaged.get_parameter(name), last.get_parameter(name))
    # The average is what the training evaluates, unless it is asked for the last values.
    expected = {True: loss_of(averaged, loaded, digits), False: loss_of(last, loaded, digits)}
    assert abs(expected[True] - expected[False]) > 1e-3
    assert loaded.result["val/loss"] == pytest.approx(expected[True], rel=EXACT)
    for ema, value in expected.items():
        assert loaded.evaluate(ema=ema)["loss"] == pytest.approx(value, rel=EXACT)
    assert loaded.evaluate()["loss"] == pytest.approx(expected[True], rel=EXACT)
    # Exported adapters are the average, and so is what is merged.
    export([str(run), str(tmp_path / "adapters"), "--ema"])
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    for name, value in average.items():
        exported = written[f"base_model.model.{name}.weight"]
        torch.testing.assert_close(exported, value, rtol=0, atol=EXACT)
    export([str(run), str(tmp_path / "merged"), "--ema", "--merge"])
    merged = MLP(64, [256, 256], 10).double()
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(merged.eval()(x), averaged.eval()(x), rtol=0, atol=EXACT)
    loaded.config.train.ema = None
    RunDir.open(run).freeze(dump(loaded.config))
    with pytest.raises(ConfigError, match="the run has no average"):
        load_run(run).evaluate(ema=True)
