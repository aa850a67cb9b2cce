"""The development cluster, as tests use it.

Where pytest-xdist runs the tests side by side (`pytest -n 3`), each of its worker processes starts
a cluster of its own when a test first needs one, and takes it down at its end. So a test has a
cluster to itself, side by side or not: it may require an empty queue, cut a node or kill a daemon.

Without pytest-xdist the tests use the cluster that runs: `eval "$(slurm/dev-cluster env)"`. A test
module that needs the cluster says so once:

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
    """Skip the test when no cluster runs; fail instead where CI=true promises one."""
    problem = _problem()
    if problem and os.environ.get("CI") == "true":
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)


@functools.cache
def _problem() -> str:
    if "PYTEST_XDIST_WORKER" in os.environ and (problem := _start_own()):
        return problem
    advice = f'first `{TOOL} up` and `eval "$({TOOL} env)"`'
    if "SLURM_CONF" not in os.environ:
        return f"no development cluster: SLURM_CONF is not set; {advice}"
    try:
        slurm("sinfo", "--noheader", timeout=10)
    except (OSError, AssertionError, subprocess.TimeoutExpired) as error:
        return f"the development cluster does not answer ({error}); {advice}"
    return ""


def _start_own() -> str:
    """Start a cluster for this process alone; return what went wrong, or ""."""
    os.environ[SETTING] = f"/var/tmp/hpctrain-test-cluster-{number()}:10.77.{number()}.0/24"
    tool("down")  # of a run that was killed together with the process below
    up = tool("up", "--nodes", "4")
    if up.returncode:
        return f"no development cluster: {up.stderr}"
    os.environ["SLURM_CONF"] = f"{os.environ[SETTING].partition(':')[0]}/slurm.conf"
    # The pipe closes when this process ends, also when it is killed.
    end = subprocess.Popen(
        ["sh", "-c", 'read -r _; exec "$0" down', str(TOOL)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(end.communicate)
    return ""


@functools.cache
def number() -> int:
    """The number of this process's clusters and subnets: no other process uses it meanwhile."""
    for n in range(1, 255):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0hpctrain-test-cluster-{n}")
        except OSError:
            name.close()
        else:
            _names.append(name)
            return n
    raise AssertionError("254 other test processes run on this machine")


_names: list[socket.socket] = []  # held until this process ends


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
    """Ask until the answer is true and give it; fail the test when it was not for so long."""
    end = time.monotonic() + timeout
    while not (answer := predicate()):
        assert time.monotonic() < end, f"waited {timeout:g} s in vain: {what}"
        time.sleep(0.2)
    return answer


ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


def queue() -> list[str]:
    """Ids of this user's jobs, one an array task."""
    return slurm("squeue", "--noheader", "--array", "--me", "--format=%i").split()


def wait_for_end(jobs: list[str], timeout: float = 240) -> dict[str, str]:
    """Job id to final state."""

    def ended() -> dict[str, str] | None:
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
        120,
        f"a checkpoint of step {step}",
    )
