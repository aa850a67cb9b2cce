"""A real `mlflow server` for tests."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class MlflowServer:
    """A server that can be killed and started again on the same port.

    Args:
        folder: Its working directory.
        store: What is behind it: a SQLite file, or the address of a database.
        artifacts: Where it keeps artifacts, which clients send through it; None means where the
            store says.
    """

    def __init__(self, folder: Path, store: Path | str, artifacts: Path | None = None) -> None:
        self._folder = folder
        self._store = f"sqlite:///{store}" if isinstance(store, Path) else store
        self._artifacts = artifacts
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
            "--port", str(self.port), "--workers", "1", "--backend-store-uri", self._store,
        ]  # fmt: skip
        if self._artifacts is not None:
            command += ["--artifacts-destination", str(self._artifacts)]
        self._log = self._folder / "server.log"
        with self._log.open("ab") as log:
            self._start(command, log)

    def _start(self, command: list[str], log: BinaryIO) -> None:
        self.process = subprocess.Popen(
            command,
            cwd=self._folder,
            # As slurm/mlflow-server.sbatch: the processes for jobs would import mlflow, each again.
            env={
                **os.environ,
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while True:
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)

    def kill(self) -> None:
        # The workers of the server are in the same session.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End the server if it runs."""
        if self.process.poll() is None:
            self.kill()


@contextmanager
def serving(server: MlflowServer) -> Iterator[MlflowServer]:
    """Start a server, and end it at the end if a test has not."""
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.close()
