"""A PostgreSQL server for a test: the fixture `postgres` of conftest.py."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tracking.mlflow_server import free_port


class Postgres:
    """A PostgreSQL server of its own, with one database, under the account `postgres`."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder, self._programs, self.port = folder, programs, free_port()
        self._address = f"postgres@127.0.0.1:{self.port}/postgres"
        self.uri = f"postgresql+psycopg2://{self._address}"

    def start(self) -> None:
        self._folder.mkdir()
        shutil.chown(self._folder, "postgres")
        self._run("initdb", "--auth=trust", "--no-sync", "--pgdata=data")
        where = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("pg_ctl", "start", "--wait", "--pgdata=data", "--log=log", f"--options={where}")

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "--mode=immediate", "--pgdata=data")

    def ask(self, query: str) -> str:
        command = [
            str(self._programs / "psql"),
            f"postgresql://{self._address}",
            "--tuples-only",
            "--no-align",
            "--command",
            query,
        ]
        return subprocess.check_output(command, text=True).strip()

    def _run(self, program: str, *arguments: str) -> None:
        command = ["runuser", "-u", "postgres", "--", str(self._programs / program), *arguments]
        subprocess.run(
            command,
            cwd=self._folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=300,
        )


@contextmanager
def serving() -> Iterator[Postgres]:
    """Skip the test where no server can be started."""
    pytest.importorskip("psycopg2", reason="NO POSTGRESQL TEST: pip install psycopg2-binary")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found or os.geteuid() != 0:
        pytest.skip("NO POSTGRESQL TEST: it needs root and `apt-get install postgresql`")
    # Every folder above must let the account `postgres` through.
    folder = Path(f"/var/tmp/hpctrain-postgres-{os.getpid()}")
    server = Postgres(folder, found[-1].parent)
    try:
        server.start()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
