"""`shell` on a real Slurm, in a real terminal: what is there, and that nothing stays."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from tests import cluster
from tests.cluster import Paced
from tests.conftest import Completed, only_run, run_json, run_module

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]
CLIENT = Path(__file__).with_name("debug_client.py")
BAD = """\
from hpctrain.tasks import Classification

class Bad(Classification):
    steps = 0
    def __call__(self, model, batch):
        self.steps += 1
        if self.steps == 3:
            found = 40 + 2
            raise ValueError("as the test asked")
        return super().__call__(model, batch)
"""
NOTEBOOK = """\
import sys, hpctrain, torch
print(*sys.argv[1:])
with hpctrain.session("name=nb", "data.path={data}", "output_dir={runs}", "tracking=off") as made:
    size = torch.distributed.get_world_size()
    print("ranks", made.rank, made.world_size, size, flush=True)
    sys.stdin.read(1)
    made.end("looked at")
"""


class Terminal:
    """A command in a pseudo-terminal of its own, whose leader it is, as a window is."""

    def __init__(self, *arguments: str) -> None:
        self.said = ""
        words = [sys.executable, "-m", "hpctrain", "shell", *arguments]
        self.pid, self._window = pty.fork()
        if self.pid == 0:  # pragma: no cover
            os.execv(sys.executable, words)

    def see(self, pattern: str) -> str:
        """Wait until the terminal shows it after what was seen before; return its first group."""
        end = time.monotonic() + 300
        while (found := re.search(pattern, self.said)) is None:
            assert time.monotonic() < end, f"{pattern}: {self.said}"
            if select.select([self._window], [], [], 1)[0]:
                self.said += os.read(self._window, 65536).decode(errors="replace")
        self.said = self.said[found.end() :]
        return found[1] if found.groups() else ""

    def type(self, text: str) -> None:
        os.write(self._window, text.encode())

    def run(self, line: str, pattern: str) -> str:
        """Type a line at the prompt, and return what its output matches."""
        self.type(f"{line}\n")
        return self.see(pattern)

    def close(self) -> None:
        """Close the window: the kernel sends SIGHUP."""
        os.close(self._window)

    def code(self) -> int:
        """Wait for the end; return the exit code, or the negative number of the signal."""
        begun = time.monotonic()
        while not (done := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < begun + 60, self.said
            try:
                if select.select([self._window], [], [], 0.2)[0]:
                    self.said += os.read(self._window, 65536).decode(errors="replace")
            except OSError:  # the window is closed
                time.sleep(0.2)
        return os.waitstatus_to_exitcode(done[1])


def nobody_waits() -> None:
    cluster.wait_for(lambda: not cluster.queue(), 60, "no job is left")


def steps() -> list[str]:
    return cluster.slurm("squeue", "--noheader", "--steps", "--format=%i").split()


@pytest.fixture
def frozen(train: Train, digits: Path, tmp_path: Path) -> Path:
    """A run that was never started, of two nodes, with lines of its site."""
    where = (f"data.path={digits}", f"output_dir={tmp_path}/runs", "launch.nodes=2")
    site = ("+site.env.COLOUR=a b", 'site.setup=["export SET_UP=yes"]', "tracking=off")
    run_module("hpctrain", "freeze", "experiment=digits", *where, *site)
    return only_run(tmp_path)


def test_a_shell_with_the_environment_of_a_run_and_no_job_after_it(frozen: Path) -> None:
    shell = Terminal(str(frozen), "launch.cpus_per_task=2", "launch.time_min=9")
    shell.see(r"1 node\(s\) for 9 minutes: to start at ")
    shell.see(rf"\({frozen.name}\) node\d:")
    told = shell.run(
        'echo "<$COLOUR|$SET_UP|$OMP_NUM_THREADS|$SLURM_JOB_NUM_NODES|$run|$HPCTRAIN_SHELL>"',
        r"<(a b\|.*)>",
    )
    assert told == f"a b|yes|2|1|{frozen}|"
    assert shell.run("type python", r"python is (\S+)") == sys.executable
    job = shell.run('echo "job=<$SLURM_JOB_ID>"', r"job=<(\d+)>")
    # Ctrl-C is for what runs in the shell.
    shell.type("sleep 1000\n")
    time.sleep(0.5)
    shell.type("\x03")
    shell.run("exit 3", r"exit")
    assert shell.code() == 3
    nobody_waits()
    assert cluster.job_state(job) == "FAILED"  # as Slurm names an exit code that is not 0


@pytest.mark.slow  # the whole environment is packed; slurm/test_environment_image has a small one
def test_a_shell_with_the_environment_that_travels(frozen: Path) -> None:
    shell = Terminal(str(frozen), "launch.environment=image", "launch.cpus_per_task=2")
    shell.see(rf"\({frozen.name}\) node\d:")
    assert "/hpctrain-" in shell.run("type python", r"python is (\S+)")
    assert "/hpctrain-" in shell.run("python -c 'import torch; print(torch)'", r"from '(\S+)'")
    shell.run("exit", r"exit")
    assert shell.code() == 0
    nobody_waits()


@pytest.mark.parametrize(
    ("end", "code"), [("hang up", 128 + signal.SIGHUP), ("kill -9", -signal.SIGKILL)]
)
def test_no_job_stays_however_the_terminal_ends(frozen: Path, end: str, code: int) -> None:
    shell = Terminal(str(frozen))
    shell.see(rf"\({frozen.name}\)")
    assert len(cluster.queue()) == 1
    if end == "hang up":
        shell.close()
    else:
        os.kill(shell.pid, signal.SIGKILL)
    assert shell.code() == code
    nobody_waits()


def test_ctrl_c_while_the_allocation_waits(tmp_path: Path) -> None:
    shell = Terminal("+site.sbatch.begin=now+1hour", f"output_dir={tmp_path}/runs")
    shell.see(r"queued and waiting for resources")
    shell.type("\x03")
    assert shell.code() == 128 + signal.SIGINT
    nobody_waits()


def test_a_shell_beside_the_ranks_of_a_run(train: Train, tmp_path: Path, paced: Paced) -> None:
    train("-m", "train.max_epochs=9000", "tracking=off", "launch.snapshot=auto", Paced.task)
    run = only_run(tmp_path)
    cluster.wait_for(lambda: run_json(run).get("state") == "running", 120, "a run that runs")
    job = cluster.slurm("squeue", "--noheader", "--me", "--format=%A")
    refused = run_module("hpctrain", "shell", str(run), "--debug", code=2)
    assert f"{run.name} is running: --debug goes on with a run" in refused.stderr
    shell = Terminal(str(run))
    shell.see(rf"\({run.name}\)")
    assert shell.run('echo "<$SLURM_JOB_ID $PYTHONSAFEPATH>"', r"<(\d+ \d)>") == f"{job} 1"
    code = run_json(run)["code"]
    assert f"/code/{code}" in shell.run('echo "<$PYTHONPATH>"', r"<(/.*)>")
    with_shell = len(steps())
    shell.close()
    assert shell.code() == 128 + signal.SIGHUP
    cluster.wait_for(lambda: len(steps()) < with_shell, 60, "the step of the shell is gone")
    assert cluster.job_state(job) == "RUNNING"


def opened(*arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """Start `shell` without a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "shell", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | env,
    )


def seen(process: subprocess.Popen[str], pattern: str) -> str:
    """Read the output until a line matches; return its first group."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(said)


def looked(port: str, expression: str) -> str:
    """Attach a debugger on the node of the one job; return where it stops, and what it is told."""
    job = cluster.slurm("squeue", "--noheader", "--me", "--format=%A")
    step = ("srun", "--overlap", "--ntasks=1", "--nodes=1", f"--jobid={job}", "--nodelist=node1")
    return cluster.slurm(*step, sys.executable, str(CLIENT), port, expression)


TUNNEL = r"ssh -J \S+@\S+ -L (\d+):localhost:\d+ \S+@node1$"


@pytest.mark.skipif("not __import__('importlib.util').util.find_spec('debugpy')")
def test_a_debugger_at_the_error_of_a_run_and_at_its_first_step(
    train: Train, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad_task.py").write_text(BAD)
    env = {"PYTHONPATH": str(tmp_path)}
    train("tracking=off", "task._target_=bad_task.Bad", code=1, **env)
    run = only_run(tmp_path)
    assert run_json(run)["state"] == "failed"

    with opened(str(run), "--debug", "error", cwd=tmp_path, **env) as process:
        port = seen(process, TUNNEL)
        # The frame in which it was raised, with its values, in the middle of the run.
        assert looked(port, "found") == "__call__ 42"
        assert process.wait(60) == 1
    nobody_waits()
    assert run_json(run)["state"] == "failed"

    with opened(str(run), "--debug", "--rank", "all", cwd=tmp_path, **env) as process:
        assert looked(seen(process, TUNNEL), "sorted(batch)") == "steps ['image', 'label', 'mask']"
        assert process.wait(60) == 1  # then comes the error
    nobody_waits()


def test_a_notebook_has_a_process_group_of_one_rank(digits: Path, tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in" / "jupyterlab"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "__main__.py").write_text(NOTEBOOK.format(data=digits, runs=tmp_path / "runs"))
    shape = ("launch.tasks_per_node=2", "name=book", f"output_dir={tmp_path}/runs")
    env = {"PYTHONPATH": str(stand_in.parent)}
    with opened("--jupyter", *shape, cwd=tmp_path, **env) as process:
        port = seen(process, TUNNEL)
        told = seen(process, r"^(--no-browser .*)$")
        assert told == f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0"
        assert seen(process, r"^ranks (.*)$") == "0 1 1"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    nobody_waits()


def test_what_slurm_refuses_is_told_by_the_key(tmp_path: Path) -> None:
    shell = Terminal("site.partition=nowhere", f"output_dir={tmp_path}/runs")
    shell.see(r"error: site.partition=nowhere: sbatch refused the job")
    assert shell.code() == LaunchError.exit_code
