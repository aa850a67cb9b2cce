"""Curves of a real journal: as text, as a picture, and as tables."""

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import ConfigError, StorageError
from hpctrain.insight.report.account.history import History
from hpctrain.insight.report.plot_command import main
from hpctrain.insight.report.views.curves import thinned
from hpctrain.results.commands.export import main as export
from hpctrain.results.commands.export import write_table
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two attempts: the second one has gone on from a checkpoint of step 5."""
    path = tmp_path / "runs" / "r-0123abcd"
    position = 0
    for first, last in ((0, 8), (6, 12)):
        tracker = JournalTracker(path, Meta("http://127.0.0.1:9", "e", "n", "r"), upload=False)
        tracker.start({}, {})
        if first:
            tracker.rewind(position)
        for step in range(first, last):
            tracker.log_metrics({"train/loss": 1 / (step + 1), "nan": math.nan}, step)
            if step == 5:
                position = tracker.position()
        tracker.finish("FINISHED")
    (path / "run.json").write_text("{}")
    (path / "config.yaml").write_text("{}")
    return path


def test_a_picture(run: Path, tmp_path: Path) -> None:
    assert main([str(run), "--out", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "runs"}


def test_tables_hold_every_value_exactly(run: Path, tmp_path: Path) -> None:
    assert write_table(run, tmp_path / "m.csv") == 24
    with (tmp_path / "m.csv").open() as file:
        rows = [(int(r["step"]), r["key"], float(r["value"])) for r in csv.DictReader(file)]
    losses = [(step, value) for step, key, value in rows if key == "train/loss"]
    assert losses == [(step, 1 / (step + 1)) for step in range(12)]
    assert sum(math.isnan(value) for _, key, value in rows if key == "nan") == 12


def test_export_writes_metrics_or_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(run), "--csv", str(tmp_path / "m.csv")]) == 0
    assert capsys.readouterr().out.endswith("m.csv: 24 values of r-0123abcd\n")
    with pytest.raises(ConfigError, match=r"export takes a folder for the weights, or --csv FILE"):
        export([str(run)])
    with pytest.raises(ConfigError, match=r"out is for weights, and --csv writes metrics"):
        export([str(run), "out", "--csv", "m.csv"])
    with pytest.raises(ConfigError, match=r"must end in \.csv"):
        export([str(run), "--csv", "m.parquet"])


def test_what_cannot_be_drawn_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metric train/los: did you mean train/loss\?"):
        main([str(run), "--metric", "train/los"])
    with pytest.raises(
        ConfigError, match=r"--out a\.html: it must end in \.png; `report --html` makes"
    ):
        main([str(run), "--out", "a.html"])
    with pytest.raises(StorageError, match=r"no-folder/a\.csv: cannot be written"):
        write_table(run, tmp_path / "no-folder" / "a.csv")
    with pytest.raises(StorageError, match="nothing was tracked"):
        write_table(tmp_path, tmp_path / "a.csv")


def test_curves_keep_restarts_and_peaks(run: Path) -> None:
    found = History.read(run)
    assert found.restarts == [6]
    assert [*found.metrics["train/loss"].steps] == [*range(12)]
    values = np.zeros(10_000)
    values[7_654], values[2_000:3_000] = 9.0, math.inf
    steps, few = thinned(np.arange(10_000.0), values, 200)
    assert len(steps) <= 301
    assert np.nanmax(few) == 9.0
    gap = steps[np.isnan(few)]  # it is left open
    assert (gap.min(), gap.max()) == (2_000, 2_900)


def test_curves_are_told_apart_without_colours(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, run.parent / "s-01234567")
    assert main([str(run.parent), "--metric", "train/loss"]) == 0
    shown = capsys.readouterr().out
    assert "• r-0123abcd\n" in shown
    assert "+ s-01234567\n" in shown
    assert shown.index("+ ") < shown.index("└")  # in the picture, too


def test_a_folder_of_runs_is_drawn_though_one_has_tracked_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "s-01234567").mkdir()
    (run.parent / "s-01234567" / "run.json").write_text("{}")
    assert main([str(run.parent)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("train/loss")
    assert "1 run has tracked nothing" in shown
    with pytest.raises(StorageError, match="s-01234567: nothing was tracked"):
        main([str(run.parent / "s-01234567")])
