"""A node without a network: `sync --watch` elsewhere brings its run to MLflow while it trains."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


def wait_for(condition: Callable[[], Any], *processes: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert time.monotonic() < deadline
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"),
    reason="NO TEST WITHOUT A NETWORK: it needs root, `unshare` and `ip`",
)
def test_config_and_live_metrics_arrive_from_a_node_without_a_network(
    digits: Path, store: Path, tmp_path: Path
) -> None:
    def rows(query: str) -> list[Any]:
        with closing(sqlite3.connect(store, timeout=60)) as database:
            return database.execute(query).fetchall()

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    training = [
        *(sys.executable, "-m", "hpctrain", "experiment=digits", f"data.path={digits}"),
        *(f"output_dir={tmp_path}/runs", "tracking.upload=false", "train.max_epochs=1000000"),
        *("train.log_every=5", "monitor.every_s=0.5"),
    ]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *training]
    with (tmp_path / "training.log").open("wb") as log:
        process = subprocess.Popen(alone, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    watching = None
    try:
        wait_for(lambda: [*tmp_path.glob("runs/*/journal/meta.json")], process)
        (meta,) = tmp_path.glob("runs/*/journal/meta.json")
        assert not meta.with_name("uploader.log").exists(), "no uploader runs on the node"
        watch = [sys.executable, "-m", "hpctrain", "status", "--upload", "--watch", "0.2"]
        watching = subprocess.Popen(watch, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        last = "SELECT coalesce(max(step), 0) FROM metrics WHERE key = 'train/loss'"
        for _ in range(2):  # what is logged later arrives later
            (before,) = rows(last)[0]
            wait_for(lambda before=before: rows(last)[0][0] > before, process, watching)
            assert rows("SELECT status FROM runs") == [("RUNNING",)]
        wait_for(lambda: rows("SELECT 1 FROM metrics WHERE key LIKE 'system/%'"), process, watching)
        ((place,),) = rows("SELECT artifact_uri FROM runs")
        config = Path(place.removeprefix("file://"), "config.yaml").read_text()
        assert "max_epochs: 1000000" in config
        process.send_signal(signal.SIGINT)
        assert process.wait(400) == 130
        wait_for(lambda: rows("SELECT status FROM runs") == [("KILLED",)], watching)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(100) == 0
    finally:
        for each in filter(None, (process, watching)):
            if each.poll() is None:
                each.kill()
                each.wait()
