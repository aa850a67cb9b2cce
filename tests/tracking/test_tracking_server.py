"""Tests with a real `mlflow server` that is killed during the upload."""

import json
import math
import os
import random
import re
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpctrain.tracking.store import check_store, experiment_id
from hpctrain.tracking.uploading.client import nature
from tests.tracking.mlflow_server import MlflowServer, serving
from tests.tracking.warm_server import WarmServer


@pytest.fixture
def server(database: Path) -> Iterator[MlflowServer]:
    with serving(MlflowServer(database.parent, database)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_eight_runs_with_sensors_while_the_server_is_killed_at_random(
    database: Path,
    tmp_path: Path,
    train: Callable[..., subprocess.Popen[str]],
    sync: Callable[..., subprocess.CompletedProcess[str]],
    rows: Callable[..., list[tuple[Any, ...]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """HPCTRAIN_KILLS sets the number of kills; 1000 take an hour, if the machine has time for them.

    The trainings go on with their steps as the kills do, so that each kill meets an upload.
    """
    runs, steps, draws = 8, 5_000, random.Random(0)
    kills = int(os.environ.get("HPCTRAIN_KILLS", "20"))
    released = tmp_path / "released"
    released.write_text("0")
    server = WarmServer(tmp_path, database)
    with serving(server):
        assert check_store(server.uri, "exp")
        processes = [
            train(
                *(tmp_path / f"r{number}", server.uri), begin=0, end=steps, drain=5.0, nodes=2,
                released=str(released),
            )
            for number in range(runs)
        ]  # fmt: skip
        for number in range(1, kills + 1):
            unfinished = tmp_path / "released.new"
            unfinished.write_text(str(steps * number // kills))
            unfinished.replace(released)
            time.sleep(draws.uniform(0.0, 2.5))  # the uploaders look every 2 s
            server.kill()
            server.start()
            server.wait()
            with (tmp_path / "kills").open("a") as log:
                log.write(f"{number}\n")
        for process in processes:
            process.communicate(timeout=590)
            assert process.returncode == 0
        for number in range(runs):  # what an uploader has left
            while "is at work" in (done := sync(tmp_path / f"r{number}")).stdout:
                time.sleep(0.5)
            assert done.returncode == 0, done.stderr
    each = steps + 2 * 4 * steps // 10
    found = rows(
        "SELECT count(*), count(DISTINCT key || ' ' || step) FROM metrics GROUP BY run_uuid"
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("r*/journal/uploader.log"))
    with capsys.disabled():
        print(
            f"\n{server.starts - 1} kills; of {runs * each} points "
            f"{runs * each - sum(distinct for _, distinct in found)} lost, "
            f"{sum(count - distinct for count, distinct in found)} doubled; "
            f"{len(re.findall('Connection aborted|Connection broken', logs))} requests were cut "
            f"off, {logs.count('refused')} refused"
        )
    assert server.starts == kills + 1
    assert found == [(each, each)] * runs
    assert rows("SELECT count(*) FROM runs") == [(runs,)]


@pytest.mark.slow
def test_a_server_killed_in_the_middle_loses_nothing(
    server: MlflowServer,
    database: Path,
    tmp_path: Path,
    train: Callable[..., subprocess.Popen[str]],
    sync: Callable[..., subprocess.CompletedProcess[str]],
    rows: Callable[..., list[tuple[Any, ...]]],
    tags: Callable[[str], dict[str, str]],
) -> None:
    assert not experiment_id(server.uri, "new")
    assert check_store(server.uri, "new"), "an uploader makes it"

    metrics = {"nan": math.nan, "inf": math.inf} | {f"m{k}": k for k in range(7)}
    process = train(
        tmp_path / "r", server.uri, begin=0, end=900, sleep=0.01, drain=200.0,
        metrics=metrics, params={"text": "ü" * 9000, "empty": ""}, nodes=2,
    )  # fmt: skip

    def count() -> int:
        with closing(sqlite3.connect(database, timeout=30)) as connection:
            return int(connection.execute("SELECT count(*) FROM metrics").fetchone()[0])

    deadline = time.monotonic() + 60
    while count() < 1000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.kill()
    server.start()  # a server needs some seconds until it answers
    text = process.communicate(timeout=240)[0]
    assert re.fullmatch(r"(INFO waiting up to 200 s .*\n)?FINISHED\n", text)
    assert "trying again" in (tmp_path / "r/journal/uploader.log").read_text()

    assert rows("SELECT count(*), count(DISTINCT key || ' ' || step) FROM metrics") == [
        (9_720, 9_720)
    ]
    assert rows(
        "SELECT key, value, is_nan FROM latest_metrics WHERE key IN ('inf', 'nan') ORDER BY key"
    ) == [
        ("inf", 1.7976931348623157e308, 0),
        ("nan", 0, 1),
    ]
    power = "SELECT sum(value) FROM metrics WHERE key = 'system/n01/gpu_3_power_usage_watts'"
    assert rows(power) == [(sum(range(0, 900, 10)),)]
    assert rows("SELECT value FROM params WHERE key = 'empty'") == [("",)]
    assert tags("r")["status"] == "FINISHED"
    assert rows("SELECT count(*) FROM runs") == [(1,)]
    assert sync(tmp_path / "r").stdout == f"{tmp_path}/r: nothing to do\n"

    def post(endpoint: str, **body: Any) -> Any:
        url = f"{server.uri}/api/2.0/mlflow/{endpoint}"
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers)
        ) as answer:
            return json.load(answer)

    # What a server says of a deleted run.
    run_id = tags("r")["id"]
    post("runs/delete", run_id=run_id)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post("runs/log-metric", run_id=run_id, key="a", value=1.0, timestamp=1, step=1)
    with refused.value:
        answer = json.load(refused.value)
    error = Exception(answer["message"])
    error.error_code = answer["error_code"]  # type: ignore[attr-defined]
    assert nature(error) == "deleted"

    # For a submission, a deleted experiment is a warning.
    (identity,) = rows("SELECT experiment_id FROM experiments WHERE name = 'exp'")[0]
    post("experiments/delete", experiment_id=str(identity))
    assert not check_store(server.uri, "exp")
