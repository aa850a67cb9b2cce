"""The table of a sweep: what its rows say, and what of the description is ours."""

import dataclasses
import json
from pathlib import Path

from hpctrain.tracking.page import sweep_table
from hpctrain.tracking.page.sweep_table import PREFIX, Row, rows_in

GOOD = Row("a lr=0.1", "1", "FINISHED", "val/loss", 0.5, "lower", 90)
BETTER = dataclasses.replace(GOOD, name="b lr=0.2", run_id="2", value=0.25)
WRONG = Row("c lr=9", "3", "FAILED", why="gradient is | not finite")
GOES_ON = dataclasses.replace(GOOD, name="d", run_id="4", status="RUNNING", value=0.1)


def test_best_first_failed_last_with_the_cause_and_what_people_wrote_stays() -> None:
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

    first = sweep_table.description("", rows[1:], 0, "7")
    assert first is not None
    assert "| [c lr=9](#/experiments/7/runs/3) | failed |" in first
    assert "gradient is \\| not finite |" in first
    again = sweep_table.description(f"mine\n{first}\nmine too", rows, 0, "7")
    assert again is not None
    assert (again[:5], again[-9:]) == ("mine\n", "\nmine too")
    assert again.count("Best: ") == 1
    assert sweep_table.description("only mine", rows, 0, "7") is None
    assert sweep_table.digest(rows) != sweep_table.digest(rows[1:])


def test_a_row_says_what_the_run_directory_knows(tmp_path: Path) -> None:
    assert Row.of(tmp_path, "n", "1", "FAILED", "w" * 999).why == "w" * 197 + "..."
    (tmp_path / "progress.json").write_text(
        '{"metric": "val/my", "better": null, "metrics": {"train/loss": 2.0}, "step": 7}'
    )
    row = Row.of(tmp_path, "n", "1", "RUNNING", "")
    assert (row.metric, row.value, row.better, row.step) == ("train/loss", 2.0, "lower", 7)
    result = {"step": 9, "val/my": 3, "train/loss": 1.0}
    (tmp_path / "run.json").write_text(json.dumps({"result": result, "sweep": {"runs": "4"}}))
    row = Row.of(tmp_path, "n", "1", "FINISHED", "")
    assert (row.metric, row.value, row.better, row.step) == ("val/my", 3.0, "", 9)
    assert sweep_table.best_of([row]) is None, "its name does not tell which values are better"
    assert sweep_table.asked_of(tmp_path) == 4
    assert Row.parse(row.text()) == row
