"""An MLflow server that starts in a moment: a fork of a process that has imported mlflow already.

python warm_server.py PORT STORE        it reads `start` and `kill` from its input

`mlflow server` takes about ten seconds of CPU time for its imports, which a test of a thousand
kills cannot spend. The fork serves MLflow's own application with uvicorn, as `mlflow server` does,
and a kill takes it away in the middle of whatever it does.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.tracking.mlflow_server import MlflowServer


class WarmServer(MlflowServer):
    """The same as `MlflowServer`, for many kills."""

    def __init__(self, folder: Path, store: Path) -> None:
        super().__init__(folder, store)
        self.starts = 0

    def start(self) -> None:
        """Start the server; the first time, start the process that is forked."""
        self._log = self._folder / "server.log"
        if not self.starts:
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(self.port), self._store],
                    env={
                        **os.environ,
                        "PYTHONPATH": str(Path(__file__).parents[2]),
                        "MLFLOW_DISABLE_TELEMETRY": "true",
                        "_MLFLOW_SERVER_FILE_STORE": self._store,
                        "_MLFLOW_SERVER_REGISTRY_STORE": self._store,
                        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
                    },
                    cwd=self._folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
        self.starts += 1
        self._ask("start")

    def kill(self) -> None:
        """Kill the server, and return when it is gone."""
        self._ask("kill")

    def close(self) -> None:
        """Kill the server, and end the process that is forked."""
        if self.process.poll() is None:
            self.process.communicate("kill\n")

    def _ask(self, what: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{what}\n", self._log.read_text()[-2000:]


def _serve(port: int) -> None:
    import uvicorn
    from mlflow.server.fastapi_app import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def main(port: int) -> None:
    """Start and kill servers, as the input says, until it ends."""
    # What a server imports by its first request, most of its time until then.
    for module in (
        *("mlflow.server.fastapi_app", "mlflow.server.sandbox.container", "alembic.command"),
        *("mlflow.store.tracking.sqlalchemy_workspace_store", "mlflow.tracing.processor.otel"),
        *("opentelemetry.sdk.metrics.export", "anyio.streams.tls", "anyio._backends._asyncio"),
        *("uvicorn", "uvicorn.lifespan.on", "uvicorn.protocols.http.h11_impl"),
    ):
        importlib.import_module(module)
    gc.freeze()
    server = 0
    for line in sys.stdin:
        if line == "start\n" and not (server := os.fork()):
            _serve(port)
            os._exit(1)
        if line == "kill\n" and server:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
            server = 0
        print(line, end="", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
