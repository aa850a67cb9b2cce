"""Tests of the trackers: what they write into the journal, and what they refuse."""

from pathlib import Path

import pytest

from hpctrain.errors import TrackingError
from hpctrain.tracking.journal import journal_path, read_all
from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker, Tracker, public


def tracker(run_dir: Path, uri: str = "sqlite:////x/mlflow.db", uid: str = "r") -> JournalTracker:
    return JournalTracker(run_dir, Meta(uri, "exp", "n", uid), upload=False)


def kinds(run_dir: Path) -> list[str]:
    return [record.body["kind"] for record in read_all(journal_path(run_dir))]


def run(tracker: Tracker, *rewinds: int) -> None:
    tracker.start({"a": 1}, {})
    for position in rewinds:
        tracker.rewind(position)
    tracker.log_metrics({"loss": 1}, 1)
    tracker.log_metrics({"loss": 1}, 2)
    tracker.sync()
    tracker.finish("FINISHED")
    tracker.finish("FAILED")  # the second call has no effect


def test_an_attempt_that_does_not_resume_starts_over(tmp_path: Path) -> None:
    one = ["status", "params", "metrics", "metrics", "status"]
    run(tracker(tmp_path))
    assert kinds(tmp_path) == one
    run(tracker(tmp_path))
    started_over = ["status", "params", "superseded", "metrics", "metrics", "status"]
    assert kinds(tmp_path) == one + started_over
    run(tracker(tmp_path), 100)
    records = list(read_all(journal_path(tmp_path)))
    assert [r.body["from"] for r in records if r.body["kind"] == "superseded"] == [0, 100]
    assert [r.body["attempt"] for r in records if r.body["kind"] == "params"] == [1, 2, 3]


def test_the_null_tracker_leaves_no_trace(tmp_path: Path) -> None:
    null = Tracker()
    run(null, 5)
    assert null.position() == 0
    assert list(tmp_path.iterdir()) == []


def test_which_name_became_which_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = tracker(tmp_path)
    for step, names in enumerate((["loss", "acc@1"], ["acc@1", "acc_1"], ["acc_1", "a//b"])):
        made.log_metrics(dict.fromkeys(names, 1.0), step)
    told = [each.getMessage().partition("metrics: ")[2] for each in caplog.records]
    mixed = "acc_1 is acc_1, as acc@1 is, so their values are mixed there"
    assert told == ["acc@1 is acc_1", mixed, "a//b is a/b"]
    tags = [r.body["tags"] for r in read_all(journal_path(tmp_path)) if r.body["kind"] == "tags"]
    assert tags[-1] == {"hpctrain.renamed": "acc@1 is acc_1; a//b is a/b"}
    made.finish("FINISHED")


def test_params_are_flattened() -> None:
    params = {"a": {"b": {"c": 1}, "d": [1, {"x": 2}]}, "e": None, "f": {}, 3: True}
    assert public(params) == {
        "a.b.c": "1",
        "a.d": "[1, {'x': 2}]",
        "e": "None",
        "f": "{}",
        "3": "True",
    }


def test_what_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="file store"):
        tracker(tmp_path, uri="mlruns")
    assert list(tmp_path.iterdir()) == []
