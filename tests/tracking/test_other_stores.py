"""Uploads to stores as companies have them: behind a token, and on PostgreSQL."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.tracking.store import check_store
from tests.postgres import Postgres
from tests.tracking.mlflow_server import MlflowServer, serving
from tests.tracking.token_proxy import TOKEN, TokenProxy

Start = Callable[..., subprocess.Popen[str]]
Sync = Callable[..., subprocess.CompletedProcess[str]]
Rows = Callable[..., list[tuple[Any, ...]]]
METRICS = {f"m{k}": k for k in range(9)}


@pytest.mark.slow
def test_a_server_with_a_token(
    database: Path,
    tmp_path: Path,
    train: Start,
    sync: Sync,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = MlflowServer(tmp_path, database, artifacts=tmp_path / "far")
    with serving(server), TokenProxy(server.port) as proxy:
        # With a wrong token the run trains, nothing is sent, and what is wrong is said.
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "wrong-token-of-somebody")
        assert not check_store(proxy.uri, "exp")
        process = train(tmp_path / "r", proxy.uri, begin=0, end=50, metrics=METRICS, drain=60.0)
        text = process.communicate(timeout=500)[0]
        assert process.returncode == 0
        assert "500 points are not in MLflow yet" in text
        assert proxy.refused > 1
        assert rows("SELECT count(*) FROM runs") == [(0,)]
        refused = sync(tmp_path / "r")
        assert refused.returncode == 1
        assert "401" in refused.stderr
        # With the right one `sync` brings everything, and the next run is live.
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
        assert check_store(proxy.uri, "exp")
        done = sync(tmp_path / "r")
        assert "500 points uploaded" in done.stdout, done.stderr
        process = train(tmp_path / "s", proxy.uri, begin=0, end=50, metrics=METRICS, drain=400.0)
        process.communicate(timeout=500)
        assert process.returncode == 0
        count = "SELECT count(*), count(DISTINCT key || ' ' || step) FROM metrics GROUP BY run_uuid"
        assert rows(count) == [(500, 500)] * 2
        assert rows("SELECT status FROM runs") == [("FINISHED",)] * 2
    assert TOKEN not in "".join(
        path.read_text(errors="replace") for path in (tmp_path / "r").rglob("*") if path.is_file()
    )


@pytest.mark.slow
def test_postgresql_behind_a_server_that_is_killed(
    postgres: Postgres, tmp_path: Path, train: Start, sync: Sync
) -> None:
    artifacts = tmp_path / "artifacts"
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
    assert list(artifacts.rglob("sweep.json"))
