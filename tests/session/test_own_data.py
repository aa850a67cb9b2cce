"""A loop of one's own with data that is not ours goes on with the exact next batch."""

from pathlib import Path

import pytest

from tests.conftest import journal_metrics, runs
from tests.session import runs_of_own

GIVEN = ("train.max_steps=20", "checkpoint.every_steps=6", "train.log_every=1")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("loader", "plain"),
        ("stateful", "plain"),
        pytest.param("list", "plain", marks=pytest.mark.slow),
        pytest.param("generator", "plain", marks=pytest.mark.slow),
        # A model of transformers, whose dropout draws; it is random, and nothing is downloaded.
        pytest.param("loader", "transformers", marks=pytest.mark.slow),
    ],
)
def test_foreign_data_goes_on_exactly(source: str, kind: str, digits: Path, tmp_path: Path) -> None:
    given = (*GIVEN, f"loop.source={source}", f"loop.kind={kind}")
    runs_of_own.started(digits, tmp_path / "whole")("foreign", *given)
    start = runs_of_own.started(digits, tmp_path / "stopped")
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "SIGKILL-9-0").touch()
    start("foreign", *given, code=-9)
    done = start("foreign", *given)
    (whole,), (stopped,) = runs(tmp_path / "whole"), runs(tmp_path / "stopped")
    runs_of_own.check_same_bits(stopped, whole)
    assert journal_metrics(stopped) == journal_metrics(whole)
    assert len(journal_metrics(whole)) == 20 * 3, "two metrics and the epoch"
    assert "samples/s" not in done.stderr + done.stdout, "only the loop knows its samples"
    if source == "stateful":
        assert "batches read here: 14" in done.stdout
        assert "are read again" not in done.stderr
