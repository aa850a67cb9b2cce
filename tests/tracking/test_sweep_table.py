"""How a sweep stands: what its rows say, and which run is best."""

import dataclasses
import json
from pathlib import Path

from hpctrain.tracking.page import sweep_table
from hpctrain.tracking.page.sweep_table import PREFIX, Row, rows_in

GOOD = Row("a lr=0.1", "1", "FINISHED", "val/loss", 0.5, "lower")
BETTER = dataclasses.replace(GOOD, name="b lr=0.2", run_id="2", value=0.25)
WRONG = Row("c lr=9", "3", "FAILED")
GOES_ON = dataclasses.replace(GOOD, name="d", run_id="4", status="RUNNING", value=0.1)


def test_best_first_and_failed_last() -> None:
    tags = {f"{PREFIX}{row.run_id}": row.text() for row in (WRONG, GOOD, GOES_ON, BETTER)}
    rows = rows_in({**tags, f"{PREFIX}5": '{"name": 7}', f"{PREFIX}6": "[", "mlflow.user": "me"})
    assert rows == [GOES_ON, BETTER, GOOD, WRONG]
    assert sweep_table.best_of(rows) == BETTER, "a run that goes on is not compared"
    assert sweep_table.tags(rows, 6) == {
        "hpctrain.sweep.state": "2 of 6 finished, 1 failed, 1 running, 2 not begun",
        "hpctrain.sweep.best": "b lr=0.2: val/loss 0.25",
        "hpctrain.sweep.best_run_id": "2",
    }
    paused = dataclasses.replace(GOOD, status="SCHEDULED", value=0.2)
    assert sweep_table.best_of([paused, WRONG]) == paused
    assert sweep_table.best_of([paused, GOOD]) == GOOD, "a trial that is paused is not compared"
    assert sweep_table.state([paused, GOOD], 0) == "1 of 2 finished, 1 paused"
    assert sweep_table.digest(rows) != sweep_table.digest(rows[1:])


def test_a_row_says_what_the_run_directory_knows(tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text(
        '{"metric": "val/my", "better": null, "metrics": {"train/loss": 2.0}, "step": 7}'
    )
    row = Row.of(tmp_path, "n", "1", "RUNNING")
    assert (row.metric, row.value, row.better) == ("train/loss", 2.0, "lower")
    result = {"step": 9, "val/my": 3, "train/loss": 1.0}
    (tmp_path / "run.json").write_text(json.dumps({"result": result, "sweep": {"runs": "4"}}))
    row = Row.of(tmp_path, "n", "1", "FINISHED")
    assert (row.metric, row.value, row.better) == ("val/my", 3.0, "")
    assert sweep_table.best_of([row]) is None, "its name does not tell which values are better"
    assert sweep_table.asked_of(tmp_path) == 4
    assert Row.parse(row.text()) == row
