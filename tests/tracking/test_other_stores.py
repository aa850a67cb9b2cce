"""Uploads to a store on PostgreSQL, as companies have them."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.tracking.store import check_store
from tests.postgres import Postgres
from tests.tracking.mlflow_server import MlflowServer, serving

Start = Callable[..., subprocess.Popen[str]]
Sync = Callable[..., subprocess.CompletedProcess[str]]
METRICS = {f"m{k}": k for k in range(9)}


@pytest.mark.slow
def test_postgresql_behind_a_server_that_is_killed(
    postgres: Postgres, tmp_path: Path, train: Start, sync: Sync
) -> None:
    artifacts = tmp_path / "artifacts"
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("seed: 1\n")
    with serving(MlflowServer(tmp_path, postgres.uri, artifacts=artifacts)) as server:
        assert check_store(server.uri, "exp")
        process = train(
            tmp_path / "r", server.uri, begin=0, end=600, sleep=0.01, metrics=METRICS,
            params={"text": "ü" * 7000}, nodes=2, drain=400.0, parent="p",
        )  # fmt: skip
        deadline = time.monotonic() + 300
        while postgres.ask("SELECT count(*) FROM metrics") == "0":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        server.kill()
        server.start()
        process.communicate(timeout=550)
        assert process.returncode == 0
        server.wait()
        sync(tmp_path / "r")
        points = 600 * 10 + 2 * 4 * 60
        query = "SELECT count(*), count(DISTINCT (key, step)) FROM metrics"
        assert postgres.ask(query) == f"{points}|{points}"
        assert postgres.ask("SELECT count(*) FROM runs WHERE status = 'FINISHED'") == "2"
        state = "SELECT value FROM tags WHERE key = 'hpctrain.sweep.state'"
        assert postgres.ask(state) == "1 of 1 finished"
    assert list(artifacts.rglob("config.yaml"))
