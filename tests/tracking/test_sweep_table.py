"""The table of a sweep: what its rows say, and what of the description is ours."""

import dataclasses
import json
from pathlib import Path

from hpctrain.tracking.page import sweep_table
from hpctrain.tracking.page.sweep_table import PREFIX, Row, rows_in

GOOD = Row("a lr=0.1", "1", "FINISHED", ("lr=0.1",), "val/loss", 0.5, "lower", 0.4, 90)
BETTER = dataclasses.replace(GOOD, name="b lr=0.2", run_id="2", swept=("lr=0.2",), value=0.25)
WRONG = Row("c lr=9", "3", "FAILED", ("lr=9",), why="gradient is | not finite")
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
        "hpctrain.sweep.failed": "c lr=9: gradient is | not finite",
    }
    paused = dataclasses.replace(GOOD, status="SCHEDULED", value=0.2)
    assert sweep_table.best_of([paused, WRONG]) == paused
    assert sweep_table.best_of([paused, GOOD]) == GOOD, "a trial that is paused is not compared"
    assert sweep_table.state([paused, GOOD], 0) == "1 of 2 finished, 1 paused"
    content = json.loads(sweep_table.table(rows))
    assert content["columns"][:3] == ["run", "lr", "status"]
    both = dataclasses.replace(GOOD, swept=("a.lr=1", "b.lr=2", "task.step=3", "seed=4"))
    columns = json.loads(sweep_table.table([both]))["columns"]
    assert columns[:5] == ["run", "a/lr", "b/lr", "task/step", "seed"]
    assert content["data"][-1][:3] == ["c lr=9", "9", "FAILED"]

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


def test_a_long_sweep_shows_its_best_and_its_failed_runs() -> None:
    many = [dataclasses.replace(GOOD, name=f"n{i:02}", value=float(i)) for i in range(40)]
    text = sweep_table.description("", [*many, WRONG], 0, "7")
    assert text is not None
    assert ("n19" in text, "n20" in text, "c lr=9" in text) == (True, False, True)
    assert "20 more runs are in the artifact `sweep.json`" in text


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


def test_runs_that_have_not_begun_are_listed_with_their_jobs(tmp_path: Path) -> None:
    run, sweep = tmp_path / "a", tmp_path / "sweep"
    listed = [
        {"name": "a lr=0.1", "swept": ["lr=0.1"], "job": "7_0", "state": "queued"},
        {"name": "b lr=0.2", "swept": ["lr=0.2"], "job": "7_1", "state": "queued"},
        {"name": "c lr=0.3", "swept": ["lr=0.3"], "job": "", "state": "no room yet"},
        {"name": "d lr=0.4", "swept": ["lr=0.4"], "job": "", "state": "finished before"},
    ]
    for folder in (run, sweep):
        folder.mkdir()
    (run / "run.json").write_text(json.dumps({"sweep": {"runs": "3", "folder": str(sweep)}}))
    assert sweep_table.waiting(run, [GOOD]) == [], "the list may be gone"
    (sweep / "sweep.json").write_text(json.dumps(listed))
    late = sweep_table.waiting(run, [GOOD])
    assert [(row.name, row.swept, row.why) for row in late] == [
        ("b lr=0.2", ("lr=0.2",), "job 7_1"),
        ("c lr=0.3", ("lr=0.3",), "not submitted: no room yet"),
    ]
    rows = [GOOD, *late]
    assert sweep_table.state(rows, 3) == "1 of 3 finished, 2 not begun"
    assert sweep_table.best_of(rows) == GOOD
    text = sweep_table.description("", rows, 3, "7")
    assert text is not None
    assert "| b lr=0.2 | not begun |" in text
    assert "| job 7_1 |" in text
    assert [row[:3] for row in json.loads(sweep_table.table(rows))["data"]] == [
        ["a lr=0.1", "0.1", "FINISHED"],
        ["b lr=0.2", "0.2", "QUEUED"],
        ["c lr=0.3", "0.3", "QUEUED"],
    ]
