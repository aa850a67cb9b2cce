"""Uploads to real SQLite stores, by real processes that are killed during the upload."""

import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.processes.child import Child
from hpctrain.tracking import final_status, samples
from hpctrain.tracking.journal import Journal, journal_path, last_record, read_all
from hpctrain.tracking.tracker import Status
from hpctrain.tracking.uploading import uploader as uploader_module
from hpctrain.tracking.uploading.child_uploader import ChildUploader
from hpctrain.tracking.uploading.upload import GaveUp
from tests import forkserver
from tests.conftest import ROOT
from tests.tracking.new_tracker import SYNC, new_tracker

Rows = Callable[..., list[tuple[Any, ...]]]
Tags = Callable[[str], dict[str, str]]
Start = Callable[..., subprocess.Popen[Any]]
Sync = Callable[..., subprocess.CompletedProcess[str]]

LARGEST = 1.7976931348623157e308


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def output(process: subprocess.Popen[Any]) -> str:
    """Return what a training has printed, without the line that it waits for its uploader."""
    lines = process.communicate(timeout=120)[0].splitlines(keepends=True)
    return "".join(line for line in lines if "INFO waiting up to" not in line)


def offline(
    run_dir: Path, database: Path, points: int, status: Status = "FINISHED", **options: Any
) -> None:
    """Write a journal with a final status, without uploading it."""
    tracker = new_tracker(run_dir, database, **options)
    tracker.start({}, {})
    for step in range(points // 10):
        tracker.log_metrics({f"m{k}": step + k / 10 for k in range(10)}, step)
    tracker.finish(status)


def test_a_run_from_start_to_end(
    database: Path, tmp_path: Path, train: Start, rows: Rows, tags: Tags
) -> None:
    begin = time.time()
    metrics = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "acc@1 (%)": 0.5, "a//b/": 1}
    params = {
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.99], "none": None, "empty": {}},
        "name": "",
        "text": "x" * 7000,
        "Größe=1": "ü" * 10,
        "k" * 300: "long key",
    }
    # What a monitor writes, with or without a GPU.
    writer = samples.SampleWriter(samples.folder(tmp_path / "r") / "n01.jsonl")
    for number in range(5):
        writer.write(begin + number, metrics={"gpu_0_power_usage_watts": 70.0 + number})
    writer.close()
    process = train(tmp_path / "r", database, begin=0, end=150, metrics=metrics, params=params)
    renamed = "acc@1 (%) is acc_1 ___", "a//b/ is a/b"
    assert output(process) == (
        f"WARNING MLflow does not take these names of metrics: {', '.join(renamed)}\nFINISHED\n"
    )
    assert process.returncode == 0

    run = tags("r")
    assert run["status"] == "FINISHED"
    assert run["who"] == "test"
    assert run["hpctrain.reason"] == "all steps done"
    assert run["hpctrain.attempt"] == "1"
    assert run["hpctrain.renamed"] == "; ".join(renamed)
    power = "system/n01/gpu_0_power_usage_watts"
    assert rows("SELECT value FROM metrics WHERE key = ? ORDER BY step", power) == [
        (70.0 + number,) for number in range(5)
    ]
    assert int(run["hpctrain.cursor"]) == journal_path(tmp_path / "r").stat().st_size
    ((started, ended, name),) = rows("SELECT start_time, end_time, name FROM runs")
    assert name == "r"
    assert begin - 1 <= started / 1000 <= ended / 1000 <= time.time()

    assert rows("SELECT count(*), count(DISTINCT key || ' ' || step) FROM metrics") == [(905, 905)]
    assert rows("SELECT value FROM metrics WHERE key = 'loss' ORDER BY step") == [
        (1 / (step + 1),) for step in range(150)
    ]
    written = {r.body.get("step"): r.body["time"] for r in read_all(journal_path(tmp_path / "r"))}
    assert rows("SELECT timestamp FROM metrics WHERE key = 'loss' AND step = 77") == [
        (round(written[77] * 1000),)
    ]
    kept = {k: (v, bool(n)) for k, v, n in rows("SELECT key, value, is_nan FROM latest_metrics")}
    assert kept.pop("loss")
    assert kept.pop(power) == (74, False)
    assert kept == {
        "nan": (0, True),
        "inf": (LARGEST, False),
        "-inf": (-LARGEST, False),
        "acc_1 ___": (0.5, False),
        "a/b": (1, False),
    }
    logged = dict(rows("SELECT key, value FROM params"))
    assert logged.pop("text").endswith("x... (7000 characters; whole in the journal)")
    (long,) = [key for key in logged if len(key) == 250]
    assert re.fullmatch("k+-[0-9a-f]{8}", long)
    assert logged.pop(long) == "long key"
    assert logged == {
        "optimizer.lr": "0.1",
        "optimizer.betas": "[0.9, 0.99]",
        "optimizer.none": "None",
        "optimizer.empty": "{}",
        "name": "",
        "Größe_1": "ü" * 10,
    }


@pytest.mark.slow
def test_sigkill_in_the_middle_again_and_again(
    database: Path, tmp_path: Path, uploader: Start, rows: Rows, tags: Tags
) -> None:
    offline(tmp_path / "r", database, 9_000)
    for node in ("n01", "n02"):
        writer = samples.SampleWriter(samples.folder(tmp_path / "r") / f"{node}.jsonl")
        for i in range(200):
            writer.write(1e9 + i, metrics={f"gpu_{k}_power_usage_watts": i for k in range(8)})
        writer.close()

    def count() -> int:
        return int(rows("SELECT count(*) FROM metrics")[0][0])

    for stop in (1, 3_000, 9_500):
        process = uploader(tmp_path / "r")
        wait_for(lambda stop=stop: count() >= stop)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert count() < 12_200
    assert uploader(tmp_path / "r").wait(60) == 0
    assert rows("SELECT count(*), count(DISTINCT key || ' ' || step) FROM metrics") == [
        (12_200, 12_200)
    ]
    assert rows("SELECT count(*) FROM runs") == [(1,)]
    power = "SELECT sum(value) FROM metrics WHERE key = 'system/n02/gpu_7_power_usage_watts'"
    assert rows(power) == [(sum(range(200)),)]
    assert rows("SELECT sum(value) FROM metrics WHERE key = 'm0'") == [(sum(range(900)),)]
    assert tags("r")["status"] == "FINISHED"


def test_killed_training_is_killed_and_its_next_attempt_continues_it(
    database: Path, tmp_path: Path, train: Start, rows: Rows, tags: Tags
) -> None:
    # MLflow keeps a value that it is sent twice only once. So the store notes how far an upload is.
    rows("CREATE TABLE positions (value INTEGER)")
    rows(
        "CREATE TRIGGER position AFTER UPDATE ON tags WHEN new.key = 'hpctrain.cursor' "
        "BEGIN INSERT INTO positions VALUES (new.value); END"
    )
    first = train(
        tmp_path / "r", database, begin=0, end=60, checkpoint=39, params={"lr": 1, "workers": 2},
        metrics={"speed": 1}, die=1.0,
    )  # fmt: skip
    text = output(first)
    assert first.returncode == -signal.SIGKILL
    wait_for(lambda: rows("SELECT 1 FROM runs WHERE status = 'KILLED'"))
    wait_for(lambda: "done" in (tmp_path / "r/journal/uploader.log").read_text())
    run = tags("r")
    assert "without a final status" in run["hpctrain.reason"]
    assert rows("SELECT count(*) FROM metrics") == [(120,)]
    last = max(r.body["time"] for r in read_all(journal_path(tmp_path / "r")))
    assert rows("SELECT end_time FROM runs") == [(round(last * 1000),)]

    (position,) = re.findall(r"POSITION (\d+)", text)
    second = train(
        tmp_path / "r", database, begin=40, end=80, rewind=int(position),
        params={"lr": 1, "workers": 8, "new": 1}, metrics={"speed": 2},
    )  # fmt: skip
    assert output(second) == "FINISHED\n"
    again = tags("r")
    assert (again["id"], again["status"]) == (run["id"], "FINISHED")
    assert again["hpctrain.attempt"] == "2"
    assert again["hpctrain.reason"] == "all steps done"
    # Values that the resumed attempt repeats are stored once; different values are stored as well.
    assert rows("SELECT count(*), count(DISTINCT step) FROM metrics WHERE key = 'loss'") == [
        (80, 80)
    ]
    assert rows("SELECT value, count(*) FROM metrics WHERE key = 'speed' GROUP BY value") == [
        (1, 60),
        (2, 40),
    ]
    assert dict(rows("SELECT key, value FROM params")) == {"lr": "1", "workers": "2", "new": "1"}
    assert again["hpctrain.changed.workers"] == "8"
    positions = [position for (position,) in rows("SELECT value FROM positions ORDER BY rowid")]
    assert positions == sorted(positions), "the second attempt has uploaded the first one again"
    assert positions[-1] == journal_path(tmp_path / "r").stat().st_size


@pytest.mark.slow
def test_a_sweep_has_its_best_value_when_its_runs_are_uploaded_at_once(
    database: Path, tmp_path: Path, rows: Rows, tags: Tags
) -> None:
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        # Two folders: the lock under which the parent is made is in each of them.
        run = tmp_path / f"folder{number % 2}" / name
        run.parent.mkdir(exist_ok=True)
        tracker = new_tracker(run, database, parent_uid="p", parent_name="sweep")
        tracker.start({}, {})
        tracker.log_metrics({"val/loss": number}, 1)
        tracker.finish("FINISHED" if number else "FAILED")
        (run / "progress.json").write_text('{"metric": "val/f1", "metrics": {"val/loss": 7}}')
    runs = [str(tmp_path / f"folder{number % 2}" / name) for number, name in enumerate(names)]
    while runs:  # on a slow machine some may give up, and are repeated
        started = {run: forkserver.Popen([*SYNC, run], cwd=ROOT) for run in runs}
        runs = [run for run, process in started.items() if process.wait(500)]
    parent = tags("p")
    assert parent["hpctrain.sweep.best"] == "n"
    latest = "SELECT value FROM latest_metrics WHERE key = 'val/loss' AND run_uuid = ?"
    assert rows(latest, parent["id"]) == [(1.0,)], "that of the run that failed does not count"


def test_a_killed_uploader_is_started_again(
    database: Path, tmp_path: Path, rows: Rows, tags: Tags
) -> None:
    tracker = new_tracker(tmp_path / "r", database, upload=True, drain=60.0)
    tracker.start({}, {})
    assert tracker._uploader.process is not None
    tracker._uploader.process.kill()
    tracker.log_metrics({"loss": 1}, 0)
    tracker.sync()
    # A signal to the whole job may come before the new uploader ignores signals.
    os.kill(tracker._uploader.process.pid, signal.SIGTERM)
    tracker.finish("FAILED", "it diverged")
    assert tags("r")["status"] == "FAILED"
    assert tags("r")["hpctrain.reason"] == "it diverged"
    ended = last_record(tmp_path / "r/journal/events.jsonl", "status")
    assert ended is not None
    assert rows("SELECT end_time FROM runs") == [(round(1000 * ended["time"]),)]
    assert rows("SELECT count(*) FROM metrics") == [(1,)]
    assert (tmp_path / "r/journal/uploader.log").read_text().count("INFO __main__: uploader") == 1


def test_offline_then_sync(
    database: Path, tmp_path: Path, train: Start, sync: Sync, rows: Rows, tags: Tags
) -> None:
    offline(tmp_path / "a", database, 1000)
    # A node has died, and the last line of the journal is incomplete.
    process = train(tmp_path / "b", database, begin=0, end=30, upload=False, die=0.01)
    assert output(process) == "DYING\n"
    writer = samples.SampleWriter(samples.folder(tmp_path / "b") / "n01.jsonl")
    writer.write(1e9, metrics={"gpu_0_power_usage_watts": 70.0})
    writer.close()
    with journal_path(tmp_path / "b").open("ab") as file:
        file.write(b'{"kind":"metrics","attempt":1,"time":1.0,"step":30,"met')
    assert rows("SELECT count(*) FROM runs") == [(0,)]

    done = sync(tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout == (
        f"{tmp_path}/a: 1000 points uploaded to sqlite:///{database}\n"
        f"{tmp_path}/b: 31 points uploaded to sqlite:///{database}"
        "; its process is gone, so it is KILLED\n"
    )
    assert (tags("a")["status"], tags("b")["status"]) == ("FINISHED", "KILLED")
    again = sync(tmp_path / "a", tmp_path / "b")
    assert again.stdout.count("nothing to do") == 2
    # A trial of a search waits at a rung, and then is not promoted.
    offline(tmp_path / "b", database, 0, "SCHEDULED")
    assert f"{tmp_path}/b: 0 points uploaded" in sync(tmp_path / "b").stdout
    assert tags("b")["status"] == "SCHEDULED"
    final_status.prune(tmp_path / "b", "pruned")
    sync(tmp_path / "b")
    assert (tags("b")["status"], tags("b")["hpctrain.reason"]) == ("KILLED", "pruned")
    # A path that is no run directory does not stop the other uploads.
    mixed = sync(tmp_path / "absent", tmp_path / "b")
    assert "absent: " in mixed.stderr
    assert "TrackingError: not everything is uploaded" in mixed.stderr
    assert "b: nothing to do" in mixed.stdout
    assert rows("SELECT count(*) FROM metrics") == [(1031,)]
    assert rows("SELECT count(*) FROM runs") == [(2,)]


@pytest.mark.slow
def test_a_run_directory_made_anew_is_another_run(
    database: Path, tmp_path: Path, sync: Sync, rows: Rows
) -> None:
    # The two directories have the same uid, because both belong to the same command: the first was
    # deleted before the second was made. The store in their meta.json cannot be used.
    offline(tmp_path / "old" / "r", Path("/lustre/mlflow.db"), 100)
    time.sleep(0.01)
    offline(tmp_path / "new" / "r", Path("/lustre/mlflow.db"), 50)
    done = sync("--uri", f"sqlite:///{database}", tmp_path / "old/r", tmp_path / "new/r")
    assert done.returncode == 0, done.stderr
    assert rows("SELECT count(*) FROM metrics GROUP BY run_uuid ORDER BY 1") == [(50,), (100,)]
    assert str(database) in (tmp_path / "new/r/journal/meta.json").read_text()
    (tmp_path / "new/r/journal/uploaded.json").unlink()
    checked = sync(tmp_path / "new/r")
    assert "0 points uploaded" in checked.stdout


def test_metrics_that_were_overtaken_before_anyone_uploaded_them_are_left_out(
    database: Path, tmp_path: Path, sync: Sync, rows: Rows, tags: Tags
) -> None:
    positions = []
    for attempt, value in enumerate([1.0, 2.0, 3.0]):
        tracker = new_tracker(tmp_path / "r", database)
        tracker.start({}, {})
        # The attempts begin at step 0, 10 and 10, because step 10 was saved last.
        tracker.rewind(positions[0] if attempt else 0)
        for step in range(10 if attempt else 0, 20):
            if step == 10:
                positions.append(tracker.position())
            tracker.log_metrics({"loss": value}, step)
        tracker.log_note("flat", "the loss has not fallen" if attempt == 0 else "", 20)
        tracker.log_note("spike", f"a spike in attempt {attempt}", 20)
        tracker.finish("FINISHED" if attempt == 2 else "FAILED")
    assert sync(tmp_path / "r").returncode == 0
    assert rows("SELECT value, count(*), min(step) FROM metrics GROUP BY value") == [
        (1.0, 10, 0),
        (3.0, 10, 10),
    ]
    assert tags("r")["status"] == "FINISHED"
    assert tags("r")["hpctrain.attempt"] == "3"
    # A note that was taken back is empty.
    assert tags("r")["hpctrain.note.flat"] == ""
    assert tags("r")["hpctrain.note.spike"] == "a spike in attempt 2"


def test_what_mlflow_refuses_does_not_hold_up_the_rest(
    database: Path, tmp_path: Path, sync: Sync, rows: Rows
) -> None:
    offline(tmp_path / "r", database, 0)
    journal = Journal(tmp_path / "r")
    for step in range(300):
        journal.append("metrics", step=step, metrics={"a": 1.0, "b": 1.0})
    # The tracker never writes these records, but another version of hpctrain may.
    journal.append("metrics", step="seventeen", metrics={"a": 1.0})
    journal.append("of the future", anything=1)
    journal.append("status", status="FINISHED")
    journal.close()
    done = sync(tmp_path / "r")
    assert done.returncode == 0, done.stderr
    assert rows("SELECT count(*) FROM metrics") == [(600,)]
    assert "seventeen" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_the_uploader(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    tracker = new_tracker(tmp_path / "r", tmp_path / "mlflow.db")
    tracker.start({}, {})
    tracker.log_metrics({"a": 1, "b": 2}, 0)
    sleep = ["sleep", "600"], dict(os.environ)
    monkeypatch.setattr("hpctrain.base.processes.child.python_module", lambda *_: sleep)
    tracker._uploader = ChildUploader(tmp_path / "r", "", 600.0)
    child = tracker._uploader.process = Child("a.program", cwd=tmp_path)
    before = signal.getsignal(number)
    caplog.set_level("INFO")  # no fault, so no warning

    def interrupt() -> None:
        wait_for(lambda: signal.getsignal(number) != before)
        os.kill(os.getpid(), number)

    ours = threading.Thread(target=interrupt)
    ours.start()
    tracker.finish("FINISHED")
    assert child.code is None, "the wait has ended before the uploader"
    ours.join()
    assert signal.getsignal(number) == before
    assert f"not everything is in MLflow yet ({number.name}); the uploader goes on" in caplog.text
    child.kill()


class Clock:
    """The module `time` with a clock of its own, which a sleep puts forward by a second."""

    def __init__(self) -> None:
        self.now, self.then = 100.0, dict[float, Callable[[], None]]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 1
        self.then.get(self.now - 100, lambda: None)()


def test_the_uploader_gives_up_after_it_has_reached_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(uploader_module, "time", clock)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    new_tracker(tmp_path / "r", "http://h").finish("FINISHED")

    def last() -> float:
        """Return the second at which it gives up, counted from the end of the training."""
        try:
            while clock.now < 1000:
                uploader._pause(1.0)
        except GaveUp:
            pass
        return clock.now - 100

    uploader = uploader_module._Uploader(tmp_path / "r", 10.0)
    uploader._stdin_open = False
    clock.then[30.0] = uploader._connected
    assert last() == 40.0
    clock.now, clock.then = 100.0, {}
    uploader = uploader_module._Uploader(tmp_path / "r", 10.0)
    uploader._stdin_open = False
    assert last() == 70.0
