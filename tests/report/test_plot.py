"""Curves of a real journal: as text, as a picture, and as a table."""

import math
import shutil
from array import array
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import ConfigError, StorageError
from hpctrain.insight.report.account.history import History, Series
from hpctrain.insight.report.plot_command import main
from hpctrain.tracking import columns
from hpctrain.tracking.journal import journal_path
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


def test_the_metrics_hold_every_value_exactly(run: Path) -> None:
    steps, keys, values = columns.read(journal_path(run))  # as `load_run(RUN).metrics` has them
    losses = keys == "train/loss"
    assert [*steps[losses]] == [*range(12)]
    assert [*values[losses]] == [1 / (step + 1) for step in range(12)]
    assert np.isnan(values).sum() == 12


def test_what_cannot_be_drawn_is_named(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metric train/los: did you mean train/loss\?"):
        main([str(run), "--metric", "train/los"])
    with pytest.raises(
        ConfigError, match=r"--out a\.html: it must end in \.png; `report --html` makes"
    ):
        main([str(run), "--out", "a.html"])


def test_curves_keep_restarts_and_peaks(run: Path) -> None:
    found = History.read(run)
    assert found.restarts == [6]
    assert [*found.metrics["train/loss"].steps] == [*range(12)]
    values = np.zeros(10_000)
    values[7_654], values[2_000:3_000] = 9.0, math.inf
    steps, few = Series(array("q", range(10_000)), array("d", values)).thinned(200)
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
