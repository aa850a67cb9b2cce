"""Processes: identify one, see whether it still runs, and start a module of hpctrain.

A child of a training is started with its signals blocked (`start_child`), until it ignores them
(`begin_child`). Its standard input ends with the training, however that ends.
"""

import logging
import os
import signal
import site
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from hpctrain.disk import give_home, opener
from hpctrain.forks import JOB_SIGNALS, job_signals_blocked, keep_private, run
from hpctrain.secrets import mask_logging


class Process(NamedTuple):
    """A process, identified by host, pid and start time, since pids are used again."""

    host: str
    pid: int
    started: int  # clock ticks since boot

    @classmethod
    def current(cls) -> "Process":
        """Return the calling process."""
        return cls(socket.gethostname(), os.getpid(), _stat(os.getpid())[1])

    @property
    def here(self) -> bool:
        """Whether the process is or was on this host; only then is `alive` meaningful."""
        return self.host == socket.gethostname()

    @property
    def state(self) -> str:
        """The letter with which /proc tells what its main thread does; "" if it runs no more."""
        letter, started = _stat(self.pid)
        return letter if started == self.started else ""

    @property
    def alive(self) -> bool:
        """Whether the process still runs; a zombie does not."""
        return bool(self.state)

    @property
    def died_here(self) -> bool:
        """Whether the process was on this host and runs no more."""
        return self.here and not self.alive


def _stat(pid: int) -> tuple[str, int]:
    """Return the state of `pid` and its start in clock ticks since boot; "", 0 if it runs not."""
    try:
        # The process name is in parentheses, and may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return ("", 0) if fields[0] in "ZX" else (fields[0], int(fields[19]))


def python_module(module: str, *args: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run `module` from any working directory.

    The new process imports the same copy of hpctrain as this one.
    """
    env = dict(os.environ)
    give_home(env)
    root = str(Path(__file__).parents[2])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    # -P: a file in the working directory must not be imported in place of mlflow.
    return [sys.executable, "-P", "-m", module, *args], env


def start_child(
    module: str,
    *args: str,
    cwd: Path,
    log_file: Path | None,
    tells: bool = False,
    **variables: str,
) -> "subprocess.Popen[bytes]":
    """Start a module of hpctrain, which calls `begin_child` first, in a session of its own.

    `log_file` is in a folder of the run directory, and gets what the module prints; without one it
    prints where this process does. The variables are those of the environment that are set for it.
    With `tells` its standard output is a pipe, at whose end it has told what there is to tell. It
    cannot be started: OSError.
    """
    command, env = python_module(module, *args)
    with (
        open(log_file, "ab", opener=opener(2)) if log_file else nullcontext() as output,
        job_signals_blocked(),
    ):
        process = subprocess.Popen(
            command,
            env=env | variables,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if tells else output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    keep_private(process.stdin.fileno())
    return process


def begin_child() -> None:
    """Ignore the signals of the job, leave the cores to the training, and log without secrets.

    The uploader must still upload what the training writes when it gets the same signal.
    """
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)
    os.nice(5)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    mask_logging()


def run_python_module(module: str, *args: str, cwd: Path, timeout: float) -> tuple[int, str]:
    """Run a module of hpctrain to its end, without input, for at most `timeout` seconds.

    Return the exit code, negative for a signal, and the last line that it has printed about an
    error. A module that has not ended in time is a `subprocess.TimeoutExpired`.
    """
    command, env = python_module(module, *args)
    done = run(command, env=env, cwd=cwd, text=True, timeout=timeout)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit code {done.returncode}"
