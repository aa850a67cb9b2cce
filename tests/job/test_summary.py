"""The table at the end of a run, which has the main metric first."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import Config
from hpctrain.job.summary import show
from hpctrain.runs.run_dir import RunDir

RESULT = {"step": 9, "train/loss": 0.5, "val/loss": 0.25, "val/mse": 0.00001234}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """A function that shows the summary of a run and returns what was printed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "run-00000001").mkdir()
    (tmp_path / "run-00000001" / "run.json").write_text(json.dumps({"result": RESULT}))

    def call(metric: str) -> str:
        show(Config(metric=metric), RunDir(tmp_path / "run-00000001"))
        return str(capsys.readouterr().out)

    return call


def test_the_main_metric_comes_first_and_is_not_rounded_to_zero(said: Any) -> None:
    rows = [line.split() for line in said("val/mse").splitlines()]
    names = [row[0] for row in rows if row[:1] and row[0].startswith(("val/", "train/"))]
    assert names == ["val/mse", "val/loss", "train/loss"]
    assert "1.234e-05" in said("val/mse")
    assert "val/mse" not in said("val/accuracy")
