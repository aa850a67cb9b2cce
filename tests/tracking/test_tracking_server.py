"""Tests with a real `mlflow server` that is killed during the upload."""

import json
import math
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

from hpctrain.tracking.store import check_store
from hpctrain.tracking.uploading.client import nature
from tests.tracking.mlflow_server import MlflowServer, serving


@pytest.fixture
def server(database: Path) -> Iterator[MlflowServer]:
    with serving(MlflowServer(database.parent, database)) as server:
        yield server


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
    ) == [("inf", 1.7976931348623157e308, 0), ("nan", 0, 1)]
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
