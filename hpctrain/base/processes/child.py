"""Processes: identify one, see whether it still runs, and run a module of hpctrain beside this one.

    this process ── Child(module) ── its input is open ────────── it works
                 ── release, or the end of this process ───────── it does what is left, and ends
                 ── revive ── if a signal has killed it ───────── it begins again

A child of a training is started with the signals of the job blocked, until it ignores them.
"""

import logging
import os
import select
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.base.files.disk import give_home, opener
from hpctrain.base.forks import JOB_SIGNALS, job_signals_blocked, keep_private, run
from hpctrain.base.secrets import mask_logging

log = logging.getLogger(__name__)
_KILLED_S = 5.0  # one that the kernel holds, as on a disk that hangs, must not hold this process


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
    root = str(Path(__file__).parents[3])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    # -P: a file in the working directory must not be imported in place of mlflow.
    return [sys.executable, "-P", "-m", module, *args], env


class Child:
    """A process beside this one that runs a module of hpctrain, in a session of its own.

    The module calls `begin` first. Its standard input ends with this process, however that ends.
    `log_file` is in a folder of the run directory, and gets what the module prints; without one it
    prints where this process does. With `tells` its standard output is a pipe, at whose end it has
    told what there is to tell. The variables are those of the environment that are set for it. It
    cannot be started: OSError.
    """

    def __init__(
        self,
        module: str,
        *args: str,
        cwd: Path,
        log_file: Path | None = None,
        tells: bool = False,
        **variables: str,
    ) -> None:
        self._name, self._log_file, self._restarts = module.rpartition(".")[2], log_file, 0
        command, env = python_module(module, *args)
        self._start: Callable[..., Any] = partial(
            subprocess.Popen,
            command,
            env=env | variables,
            cwd=cwd,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._tells = tells
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        file = self._log_file
        with (
            open(file, "ab", opener=opener(2)) if file else nullcontext() as output,
            job_signals_blocked(),
        ):
            told = subprocess.PIPE if self._tells else output
            process: subprocess.Popen[bytes] = self._start(stdout=told, stderr=output)
        assert process.stdin is not None
        keep_private(process.stdin.fileno())
        return process

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def has_told(self) -> bool:
        """Whether it has told what there is to tell."""
        told = self._process.stdout
        return told is None or told.closed or bool(select.select([told], [], [], 0)[0])

    def ask(self, line: str) -> None:
        """Write a line to its standard input; its code tells whether it is there."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def revive(self, most: int | None = None) -> None:
        """Start it again if it has ended; with `most`, so often, and only if a signal killed it.

        With a code of its own it may have given up on purpose.
        """
        code = self.code
        if code is None or (most is not None and (code >= 0 or self._restarts >= most)):
            return
        self.release()
        self._restarts += 1
        log.warning("the %s was killed; it is started again", self._name)
        try:
            self._process = self._started()
        except OSError as error:  # it is tried again the next time
            log.warning("the %s cannot be started: %s", self._name, error)

    def close_input(self) -> None:
        """Let it end when it has done what is left; it may go on after this process."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def release(self) -> None:
        """Do so, and listen no more to what it tells."""
        self.close_input()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def wait(self, seconds: float) -> int | None:
        """Return its exit code if it ends within so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Kill it, and all that it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self.wait(_KILLED_S)

    def end(self, seconds: float) -> None:
        """Let it end, within so many seconds."""
        self.release()
        if self.wait(seconds) is None:
            self.kill()


def begin() -> None:
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


def run_module(
    module: str, *args: str, cwd: Path, timeout: float, log_file: Path | None = None
) -> str:
    """Run a module of hpctrain to its end, without input, for at most `timeout` seconds.

    Return "" if all is well, or else the last line that it has printed; what goes into a `log_file`
    is not returned.
    """
    command, env = python_module(module, *args)
    with open(log_file, "ab", opener=opener(2)) if log_file else nullcontext() as output:
        pipes = {"stdout": output, "stderr": output} if log_file else {}
        try:
            done = run(command, env=env, cwd=cwd, text=True, timeout=timeout, **pipes)
        except subprocess.TimeoutExpired:
            return f"not done within {timeout:g} s"
    if done.returncode < 0:
        return f"{signal.Signals(-done.returncode).name} has killed it"
    lines = (done.stderr or done.stdout or "").strip().splitlines()
    return (lines[-1] if lines else f"exit code {done.returncode}") if done.returncode else ""
