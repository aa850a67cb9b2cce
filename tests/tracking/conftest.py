"""Fixtures with real stores and real processes. The test process itself never imports mlflow."""

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.processes.child import python_module
from hpctrain.tracking.store import beside
from tests import forkserver
from tests.conftest import ROOT, copy_store
from tests.tracking.new_tracker import SYNC

Rows = list[tuple[Any, ...]]


def python(*args: str) -> list[str]:
    return [sys.executable, *args]


@pytest.fixture(scope="session")
def first_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A store that three processes have created at the same time, and their exit codes.

    Before, a process was killed while it created the store.
    """
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    command = python("-m", "tests.tracking.make_store", str(path), "exp")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
    killed = forkserver.Popen(command, **quiet)
    unfinished = beside(path, "new")
    while not (unfinished.exists() and unfinished.stat().st_size):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not path.exists()
    processes = [forkserver.Popen(command, **quiet) for _ in range(3)]
    return path, [process.wait(120) for process in processes]


@pytest.fixture
def database(empty_store: Path, tmp_path: Path) -> Path:
    """A store for this test. It is a copy, because creating one takes seconds."""
    return copy_store(empty_store, tmp_path / "mlflow.db")


@pytest.fixture
def rows(database: Path) -> Callable[..., Rows]:
    """A function that runs a query on the store."""

    def ask(query: str, *values: Any) -> Rows:
        with closing(sqlite3.connect(database, timeout=30)) as connection:
            return connection.execute(query, values).fetchall()

    return ask


@pytest.fixture
def tags(rows: Callable[..., Rows]) -> Callable[[str], dict[str, str]]:
    """A function that returns the tags of the run with a uid, its id and its status."""

    def ask(uid: str) -> dict[str, str]:
        ((run_id, status),) = rows(
            "SELECT run_uuid, status FROM runs JOIN tags USING (run_uuid) "
            "WHERE key = 'hpctrain.uid' AND value = ?",
            uid,
        )
        found = dict(rows("SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
        return {**found, "id": run_id, "status": status}

    return ask


@pytest.fixture
def train() -> Callable[..., subprocess.Popen[str]]:
    """A function that starts a training, whose output is in `stdout`."""

    def start(run_dir: Path, uri: str | Path, **options: Any) -> subprocess.Popen[str]:
        uri = f"sqlite:///{uri}" if isinstance(uri, Path) else uri
        return forkserver.Popen(
            python("-m", "tests.tracking.fake_training", str(run_dir), uri, json.dumps(options)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )

    return start


@pytest.fixture
def sync() -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs `python -m hpctrain status --upload`."""

    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*SYNC, *map(str, args)]
        return forkserver.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)

    return run


@pytest.fixture
def uploader() -> Callable[..., subprocess.Popen[bytes]]:
    """A function that starts an uploader as the tracker does."""

    def start(run_dir: Path, *args: str) -> subprocess.Popen[bytes]:
        command, env = python_module("hpctrain.tracking.uploading.uploader", str(run_dir), *args)
        with (run_dir / "journal" / "uploader.log").open("ab") as log:
            return forkserver.Popen(command, env=env, stdin=subprocess.DEVNULL, stderr=log)

    return start
