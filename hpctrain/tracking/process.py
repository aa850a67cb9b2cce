"""Processes: which one this is, whether one still lives, how to start a module of ours."""

import os
import signal
import site
import socket
import sys
from pathlib import Path
from typing import NamedTuple

# What a scheduler, a terminal or a user sends to a whole job. The uploader must outlive them: it
# still has to carry over what the training writes while it reacts to the same signal.
BROADCAST_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Process(NamedTuple):
    """A process by host, number and start time: numbers are used again, the three are not."""

    host: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> "Process":
        """This one."""
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()) or 0)

    @property
    def here(self) -> bool:
        """Whether it is (or was) on this host, so that `alive` can tell."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    """The start time of `pid` in clock ticks since boot; None if it does not run."""
    try:
        # The name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def python_module(module: str, *args: str) -> tuple[list[str], dict[str, str]]:
    """The command and environment that run `module` with this very hpctrain, from any folder."""
    env = dict(os.environ)
    root = str(Path(__file__).parents[2])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    # -P: whatever lies in the working directory must not be imported in the place of mlflow.
    return [sys.executable, "-P", "-m", module, *args], env
