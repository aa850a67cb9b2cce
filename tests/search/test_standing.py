"""What `status` and `report` show of a search, whose study and runs are made by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.slurm.queue import Job, Queue
from hpctrain.commands import cancel, resume, status
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.insight.report import report_command
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.search import worker_arrays
from hpctrain.tracking.journal import last_record
from tests.search.conftest import worker
from tests.search.made_search import make_search


def shown(capsys: pytest.CaptureFixture[str], command: Any, *argv: object) -> str:
    assert command.main([*map(str, argv)]) == 0
    return capsys.readouterr().out


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_status_of_a_search_that_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_slurm: None
) -> None:
    make_search(tmp_path)
    text = shown(capsys, status, "--dir", tmp_path, "2026")
    states = "1 failed, 1 finished, 10 pruned"
    assert text.startswith(f"search digits-1: 12 of 12 trials, {states}, minimize val/loss, ")
    assert words(text)[1:5] == [
        ["rung", "step", "reached", "promoted", "best"],
        ["1", "10", "11", "4", "0.1"],
        ["2", "30", "4", "1", "0.033333"],
        ["3", "90", "1", "0.011111"],
    ]
    assert words(text)[7][:6] == ["5", "digits-00000005", "finished", "0.1", "0.033333", "0.011111"]
    assert "not in the best third at step 30" in text
    assert "The best is trial 5, `digits-00000005` (lr=" in text
    assert "): val/loss is 0.011111 at step 90." in text
    # A step takes two ranks a second: 7 x 10 + 3 x 30 + 90 steps, and 3 s of the failed trial.
    assert f"taken {2 * 253 / 3600:.3g} device-hours." in text
    assert "The search is over: no trial is left" in text
    told = json.loads(shown(capsys, status, "--dir", tmp_path, "2026", "--json"))
    assert (len(told["runs"]), told["search"]["best"]) == (12, 5)
    assert told["search"]["rungs"][1]["promoted"] == 1
    assert told["search"]["trials"][5]["values"]["90"] == pytest.approx(1 / 90)


def test_the_end_of_a_search_is_recorded_for_mlflow(tmp_path: Path, no_slurm: None) -> None:
    sweep = make_search(tmp_path, told=False)
    assert worker(sweep).next() is None
    journals = sorted(tmp_path.glob("*/journal/events.jsonl"))
    ended = [last_record(journal, "status") or {} for journal in journals]
    status = [each["status"] for each in ended]
    assert status == ["KILLED"] * 5 + ["FINISHED"] + ["KILLED"] * 5 + ["FAILED"]
    assert ended[0]["reason"] == "pruned: val/loss=0.6 at step 10 is not in the best 1/3"


def test_the_report_of_a_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_slurm: None
) -> None:
    make_search(tmp_path, 24)
    page = tmp_path / "search.html"
    text = shown(capsys, report_command, "--dir", tmp_path, "2026", "--html", page)
    content = re.sub("</?code>", "", page.read_text())
    for each in (text, content):
        assert "device-hours" in each
        assert "digits-00000005" in each
    assert text.count("failed: ValueError: no luck") == 1, "a pruned trial has a result"
    told = json.loads(shown(capsys, report_command, "--dir", tmp_path, "2026", "--json"))
    assert (len(told["runs"]), told["search"]["best"]) == (24, 5)


def test_cancel_finds_workers_that_have_no_trial_yet(
    tmp_path: Path, no_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = make_search(tmp_path, over=False)
    here = worker_arrays.new_worker(sweep, worker_arrays.WorkerFile())
    script = sweep / "workers" / "array-0" / "job.sh"
    waits = worker_arrays.new_worker(sweep, worker_arrays.WorkerFile(str(script)))
    script.parent.mkdir()
    (script.parent / "tasks").write_text(f"{waits}\n")
    job = Job("7_0", "PENDING", "Priority", "", "N/A")
    monkeypatch.setattr(worker_arrays, "queued", lambda users: Queue({(str(script), 0): job}))
    cancelled: list[list[str]] = []
    monkeypatch.setattr(cancel.queue, "cancel", lambda jobs, *_: cancelled.append([*jobs]))
    for names in (["--all"], [sweep.name]):
        assert cancel.main(["--dir", str(tmp_path), *names]) == 0
        assert cancelled[-1] == ["7_0"], names
        for worker_dir in (here, waits):
            assert stop_request.read(worker_dir) is not None
            stop_request.StopRequest.drop(worker_dir)


def test_resume_leaves_the_trials_of_a_search_to_its_workers(
    tmp_path: Path, no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_search(tmp_path)
    where = ["--dir", str(tmp_path)]
    told = "11 trials left to their searches, which go on when their commands are given again"
    assert resume.main(where) == 0  # a worker without Slurm has trained the one that has failed
    assert told in capsys.readouterr().out
    for name in ("digits-00000007", "digits-00000011"):  # paused, and failed
        script = {
            "script": str(sweep / "workers" / "array-0" / "job.sh"),
            "user": "me",
            "time": 4e9,
        }
        RunDir(tmp_path / name).update(submission=script)
    with pytest.raises(ConfigError, match="when its command is given again"):
        resume.main([*where, sweep.name])
    assert resume.main(where) == 0
    assert told in capsys.readouterr().out
    with pytest.raises(LaunchError, match="digits-00000007 was submitted to Slurm"):
        resume.main([*where, "digits-00000007"])
