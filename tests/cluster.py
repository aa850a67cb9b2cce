"""The development cluster for tests.

Each test process starts a cluster of its own when a test first needs one, and takes it down at its
end. Where pytest-xdist runs the tests side by side (`pytest -n 3`), that is one cluster for each
worker process: no test sees the jobs of another, and any test may require an empty queue, cut off
a node or kill a daemon. To keep a cluster for many runs of pytest, start it by hand: a pytest
without `-n` uses the cluster that SLURM_CONF names (`eval "$(slurm/dev-cluster env)"`).

A test module that needs the cluster requires it once:

    from tests import cluster

    pytestmark = pytest.mark.slurm

    @pytest.fixture(autouse=True)
    def running() -> None:
        cluster.require()
"""

import atexit
import functools
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from hpctrain.base.names.step_names import of_steps, step_of
from tests.conftest import run_json, runs

TOOL = Path(__file__).parents[1] / "slurm" / "dev-cluster"
SETTING = "HPCTRAIN_DEV_CLUSTER"
T = TypeVar("T")


def require() -> None:
    """Skip the test where no cluster can run; fail it instead where CI=true."""
    if (found := problem()) and os.environ.get("CI") == "true":
        pytest.fail(found)
    if found:
        pytest.skip(found)


@functools.cache
def problem() -> str:
    """Start a cluster if there is none; return why none can be used here, or ""."""
    if "PYTEST_XDIST_WORKER" in os.environ or "SLURM_CONF" not in os.environ:
        return _start_own()
    try:
        slurm("sinfo", "--noheader", timeout=60)
    except (OSError, AssertionError, subprocess.TimeoutExpired) as error:
        return f"the cluster of SLURM_CONF={os.environ['SLURM_CONF']} does not answer ({error})"
    return ""


def _start_own() -> str:
    """Start a cluster for this process alone; return what went wrong, or ""."""
    os.environ[SETTING] = f"/var/tmp/hpctrain-test-cluster-{number()}:10.77.{number()}.0/24"
    tool("down")  # a previous run that was killed together with its `sh` may have left a cluster
    # The pipe closes when this process ends, also when it is killed or interrupted during `up`.
    # The child holds the socket, so the number stays taken until the cluster is down.
    end = subprocess.Popen(
        ["sh", "-c", 'read -r _; exec "$0" down', str(TOOL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[_claim()[1].fileno()],
        start_new_session=True,
    )
    atexit.register(end.communicate)
    up = tool("up", "--nodes", "4")
    if up.returncode:
        return f"no development cluster: {up.stderr}"
    os.environ["SLURM_CONF"] = f"{os.environ[SETTING].partition(':')[0]}/slurm.conf"
    return ""


def number() -> int:
    """Return the number of this process's cluster and subnet, which no other process uses now."""
    return _claim()[0]


@functools.cache
def _claim() -> tuple[int, socket.socket]:
    """Return a free number and a socket; the number is taken as long as the socket is open."""
    for n in range(1, 255):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0hpctrain-test-cluster-{n}")
        except OSError:
            name.close()
        else:
            atexit.register(name.close)
            return n, name
    raise AssertionError("254 other test processes run on this machine")


def slurm(*command: str, env: Mapping[str, str] | None = None, timeout: float = 120) -> str:
    """Run a command and return its output; an AssertionError shows the output of a failed one."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {said}"
    return done.stdout.strip()


def tool(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run slurm/dev-cluster with changes to the environment."""
    return subprocess.run(
        [str(TOOL), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


def heal() -> None:
    """Make every node usable, also a node that did not answer slurmctld on a busy machine."""
    done = tool("up")
    assert done.returncode == 0, f"dev-cluster up: {done.stdout}{done.stderr}"
    if "healed" in done.stdout:
        print(done.stdout)  # why a node was down; pytest shows it where the test fails


def sbatch(script: str, *options: str, env: Mapping[str, str] | None = None) -> str:
    """Submit the text of a shell script; return the job id."""
    return slurm("sbatch", "--parsable", *options, "--wrap", script, env=env)


def job_state(job: str) -> str:
    """Return the state of a running or ended job: `PENDING`, `RUNNING`, `COMPLETED`, ...

    The state is empty when Slurm does not know the job.
    """
    queued = subprocess.run(
        ["squeue", "--noheader", "--job", job, "--format=%T"], capture_output=True, text=True
    ).stdout.split()
    if queued:
        return queued[0]
    # `CANCELLED by 0` is one state.
    accounting = ("sacct", "-X", "--noheader", "--parsable2", "--jobs", job, "--format=State")
    # A job that has lost a node has a line of its time with this node, too: RESIZING.
    lines = slurm(*accounting).splitlines()
    states = [line.split()[0] for line in lines if line != "RESIZING"]
    return states[0] if states else ""


def wait_for(predicate: Callable[[], T], timeout: float, what: str) -> T:
    """Call `predicate` until its answer is true and return it; fail the test after `timeout` s.

    The pauses between the calls grow from 0.2 s to 1 s, because most calls start a command.
    """
    begin = time.monotonic()
    while not (answer := predicate()):
        waited = time.monotonic() - begin
        assert waited < timeout, f"waited {timeout:g} s in vain: {what}"
        time.sleep(min(max(waited / 5, 0.2), 1.0))
    return answer


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}


def queue() -> list[str]:
    """Return the ids of this user's jobs, one for each array task."""
    return slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split()


def wait_for_end(jobs: list[str], timeout: float = 240) -> dict[str, str]:
    """Wait until all jobs have ended, for at most `timeout` s; return job id to final state."""

    waiting = ["squeue", "--noheader", f"--job={','.join(jobs)}", "--format=%i"]

    def ended() -> dict[str, str] | None:
        if len(jobs) > 1 and subprocess.run(waiting, capture_output=True).stdout.strip():
            return None
        states = {job: job_state(job) for job in jobs}
        return states if set(states.values()) <= ENDED else None

    return wait_for(ended, timeout, f"the end of {jobs}")


def job_ids(folder: Path) -> list[str]:
    """Return the array tasks of all runs under `folder`, which is an `output_dir`."""
    return [job_id(run) for run in runs(folder)]


def job_id(run: Path) -> str:
    """Return the array task that was given the run, such as `12_0`."""
    asked = run_json(run)["submission"]
    array = Path(asked["script"]).with_name("job_id").read_text().strip()
    return f"{array}_{asked['task']}"


def wait_for_step(run: Path, step: int) -> None:
    """Wait for a checkpoint of at least `step`, for at most 180 s."""
    wait_for(
        lambda: any(step_of(p) >= step for p in of_steps(run / "checkpoints")),
        180,
        f"a checkpoint of step {step}",
    )


PACED = """\
import os, time
from hpctrain.tasks import Classification

class Paced(Classification):
    def __call__(self, model, batch):
        if os.path.exists(os.path.dirname(__file__) + "/slow"):
            time.sleep(0.05)
        if os.path.exists(os.path.dirname(__file__) + "/fail"):
            raise RuntimeError("as the test asked")
        return super().__call__(model, batch)
"""


class Paced:
    """A task whose steps sleep 0.05 s until `go` is called.

    It lets a test reach a run before the run ends, however short the run and however busy the
    machine. The sleeping leaves the processors to other processes.

    Attributes:
        task: The override that chooses this task.
    """

    task = "task._target_=paced_task.Paced"

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "paced_task.py").write_text(PACED)
        self._slow, self._fail = folder / "slow", folder / "fail"
        self._slow.touch()
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def go(self) -> None:
        """Let all further steps run without sleeping."""
        self._slow.unlink()

    def fail(self, on: bool = True) -> None:
        """Let all further steps raise an exception, or no longer."""
        if on:
            self._fail.touch()
        else:
            self._fail.unlink()
