"""Programs that run in processes of their own, as the ranks of a run or as somebody else."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from tests import forkserver
from tests.conftest import Completed


def free_port() -> int:
    """Return a port of this host on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def start(
    folder: Path, name: str, program: str, *arguments: object, **env: str
) -> forkserver.Popen:
    """Start a program, which gets the arguments and the folder."""
    (folder / f"{name}.py").write_text(textwrap.dedent(program))
    return forkserver.Popen(
        [sys.executable, "-m", name, *map(str, arguments), str(folder)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def end(process: forkserver.Popen) -> Completed:
    """Wait for the end of a program."""
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
