"""Results of `evaluate --record`: in the run's MLflow run, exactly once."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.tracking import columns, recorded
from hpctrain.tracking.journal import journal_path
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.pending_upload import is_uploaded
from tests.tracking.new_tracker import SYNC, new_tracker

Rows = Callable[..., list[tuple[Any, ...]]]


def test_results_after_the_end_of_a_run_are_stored_once(
    database: Path, tmp_path: Path, rows: Rows
) -> None:
    run = tmp_path / "r"
    tracker = new_tracker(run, database, uid="r")
    tracker.start({}, {})
    tracker.log_metrics({"train/loss": 1.0}, 20)
    tracker.finish("FINISHED")
    first = recorded.record(run, 20, {"val/loss": 0.5, "val/odd": float("nan")}, "xxh3_128:a")
    # The same checkpoint is evaluated again: the first result counts.
    again = recorded.record(run, 20, {"val/loss": 0.6}, "xxh3_128:a")
    assert (again.time, again.metrics["val/loss"]) == (first.time, 0.5)
    recorded.record(run, 10, {"val/loss": 0.7}, "xxh3_128:b")
    (run / "evaluations" / "recorded" / ".step-00000030.json.host.1").write_text("{")  # unfinished
    assert recorded.steps(run) == {10, 20}
    assert not is_uploaded(run, Meta.read(run))
    for _ in range(2):
        # The second upload knows nothing of the first one, as after a kill before its note.
        (run / "journal" / "uploaded.json").unlink(missing_ok=True)
        done = subprocess.run([*SYNC, str(run)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert is_uploaded(run, Meta.read(run))
    assert sorted(rows("SELECT key, step, value FROM metrics WHERE key != 'val/odd'")) == [
        ("train/loss", 20, 1.0),
        ("val/loss", 10, 0.7),
        ("val/loss", 20, 0.5),
    ]
    assert rows("SELECT step, is_nan FROM metrics WHERE key = 'val/odd'") == [(20, 1)]
    # A run is FINISHED, whatever arrives later.
    assert rows("SELECT status FROM runs") == [("FINISHED",)]
    assert json.loads((run / "journal" / "uploaded.json").read_text())["evaluations"] == [10, 20]
    steps, keys, values = columns.read(journal_path(run))
    found = {(key, int(step)): value for step, key, value in zip(steps, keys, values, strict=True)}
    assert found["val/loss", 10] == 0.7
    assert found["train/loss", 20] == 1.0
