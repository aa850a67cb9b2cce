"""The development cluster, as tests use it.

Each test process starts a cluster of its own when a test first needs one, and takes it down at its
end. Where pytest-xdist runs the tests side by side (`pytest -n 3`), that is one cluster for each
worker process: no test sees the jobs of another, and any test may require an empty queue, cut a
node or kill a daemon. To keep a cluster for many runs of pytest, start it by hand: a pytest without
`-n` uses the cluster that SLURM_CONF names (`eval "$(slurm/dev-cluster env)"`).

A test module that needs the cluster says so once:

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

from tests.conftest import run_json, runs

TOOL = Path(__file__).parents[1] / "slurm" / "dev-cluster"
SETTING = "HPCTRAIN_DEV_CLUSTER"
T = TypeVar("T")


def require() -> None:
    """Skip the test when there can be no cluster; fail instead where CI=true promises one."""
    problem = _problem()
    if problem and os.environ.get("CI") == "true":
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)


@functools.cache
def _problem() -> str:
    if "PYTEST_XDIST_WORKER" in os.environ or "SLURM_CONF" not in os.environ:
        return _start_own()
    try:
        slurm("sinfo", "--noheader", timeout=10)
    except (OSError, AssertionError, subprocess.TimeoutExpired) as error:
        return f"the cluster of SLURM_CONF={os.environ['SLURM_CONF']} does not answer ({error})"
    return ""


def _start_own() -> str:
    """Start a cluster for this process alone; return what went wrong, or ""."""
    os.environ[SETTING] = f"/var/tmp/hpctrain-test-cluster-{number()}:10.77.{number()}.0/24"
    tool("down")  # what a run left that was killed together with the process below
    # The pipe closes when this process ends, also when it is killed or interrupted during `up`. The
    # number stays taken until the cluster is down.
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
    """The number of this process's clusters and subnets: no other process uses it meanwhile."""
    return _claim()[0]


@functools.cache
def _claim() -> tuple[int, socket.socket]:
    """A number, and the socket whose name says that it is taken as long as the socket is open."""
    for n in range(1, 255):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0hpctrain-test-cluster-{n}")
        except OSError:
            name.close()
        else:
            return n, name
    raise AssertionError("254 other test processes run on this machine")


def slurm(*command: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
    """Run a command and give its output; an AssertionError shows what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {said}"
    return done.stdout.strip()


def tool(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run slurm/dev-cluster, with changes to the environment."""
    return subprocess.run(
        [str(TOOL), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


def heal() -> None:
    """Make every node usable, also one that slurmctld gave up on a machine too busy to answer."""
    done = tool("up")
    assert done.returncode == 0, f"dev-cluster up: {done.stdout}{done.stderr}"
    if "healed" in done.stdout:
        print(done.stdout)  # why a node was hurt: pytest shows it where the test fails


def sbatch(script: str, *options: str, env: Mapping[str, str] | None = None) -> str:
    """Submit the text of a shell script; give the job id."""
    return slurm("sbatch", "--parsable", *options, "--wrap", script, env=env)


def job_state(job: str) -> str:
    """The state of a job, running or ended: `PENDING`, `RUNNING`, `COMPLETED`, `CANCELLED`...

    Empty when Slurm has not heard of it.
    """
    queued = subprocess.run(
        ["squeue", "--noheader", "--job", job, "--format=%T"], capture_output=True, text=True
    ).stdout.split()
    # `CANCELLED by 0` is one state.
    accounting = ("sacct", "-X", "--noheader", "--parsable2", "--jobs", job, "--format=State")
    states = queued or [line.split()[0] for line in slurm(*accounting).splitlines()]
    return states[0] if states else ""


def wait_for(predicate: Callable[[], T], timeout: float, what: str) -> T:
    """Ask until the answer is true and give it; fail the test when it was not for so long.

    What takes long is asked for less often: most questions start a command.
    """
    begin = time.monotonic()
    while not (answer := predicate()):
        waited = time.monotonic() - begin
        assert waited < timeout, f"waited {timeout:g} s in vain: {what}"
        time.sleep(min(max(waited / 10, 0.1), 1.0))
    return answer


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def queue() -> list[str]:
    """Ids of this user's jobs, one an array task."""
    return slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split()


def wait_for_end(jobs: list[str], timeout: float = 240) -> dict[str, str]:
    """Job id to final state."""

    waiting = ["squeue", "--noheader", f"--job={','.join(jobs)}", "--format=%i"]

    def ended() -> dict[str, str] | None:
        if len(jobs) > 1 and subprocess.run(waiting, capture_output=True).stdout.strip():
            return None
        states = {job: job_state(job) for job in jobs}
        return states if set(states.values()) <= ENDED else None

    return wait_for(ended, timeout, f"the end of {jobs}")


def job_ids(folder: Path) -> list[str]:
    return [job_id(run) for run in runs(folder)]


def job_id(run: Path) -> str:
    """The array task that the run was given to."""
    asked = run_json(run)["submission"]
    array = Path(asked["script"]).with_name("job_id").read_text().strip()
    return f"{array}_{asked['task']}"


def wait_for_step(run: Path, step: int) -> None:
    wait_for(
        lambda: any(int(p.name[5:]) >= step for p in run.glob("checkpoints/step-????????")),
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
        return super().__call__(model, batch)
"""


class Paced:
    """A task whose steps sleep 0.05 s until `go` is called.

    So a test reaches a run before its end, however short the run and however busy the machine is,
    and a run that only waits to be hit leaves the processors to others.

    Attributes:
        task: the override that chooses it.
    """

    task = "task._target_=paced_task.Paced"

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "paced_task.py").write_text(PACED)
        self._slow = folder / "slow"
        self._slow.touch()
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    def go(self) -> None:
        """From now on, nothing sleeps."""
        self._slow.unlink()
