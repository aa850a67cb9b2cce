"""A fixture for anybody's tests: a Slurm cluster of four nodes for this process of pytest alone.

    pytest_plugins = ["hpctrain.testing.fixtures"]  # in conftest.py at the top of the project

    def test_it_outlives_a_preemption(slurm_cluster):
        ...  # `sbatch`, and so `python -m hpctrain -m`, submit to the cluster meanwhile
        slurm_cluster("preempt", job)

pytest does not load it by itself, and only this module imports pytest.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hpctrain.base.errors import LaunchError
from hpctrain.testing.command import TOOL

SETTING = "HPCTRAIN_DEV_CLUSTER"  # the tool reads it: FOLDER:SUBNET of the cluster that is meant


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Callable[..., str]]:
    """Run a Slurm cluster until the tests end; without one skip them, or fail where CI=true.

    The value is a function: `slurm_cluster("hurry", job)` does what `python -m hpctrain cluster
    hurry JOB` does, and returns what that prints. It raises LaunchError where that fails.
    """
    problem = ""
    with ExitStack() as stack:
        try:
            stack.enter_context(running())
        except LaunchError as error:
            problem = str(error)
        if problem and os.environ.get("CI") == "true":
            pytest.fail(problem, pytrace=False)
        if problem:
            pytest.skip(problem)
        yield call


@contextmanager
def running(nodes: int = 4, *settings: str) -> Iterator[None]:
    """Run a cluster, which the environment of this process names meanwhile.

    A development cluster that SLURM_CONF names already is used, and left as it is. But each worker
    process of pytest-xdist gets its own: no test sees the jobs of another, and any test may require
    an empty queue, cut off a node or kill a daemon.

    Args:
        nodes: How many, 1 to 64.
        settings: Lines of slurm.conf, such as `MaxArraySize=11`.

    Raises:
        LaunchError: None can run here, and why: a missing package, a missing right, ...
    """
    given = os.environ.get("SLURM_CONF", "")
    ours = given and Path(given).parent.joinpath("cluster.json").exists()
    if ours and "PYTEST_XDIST_WORKER" not in os.environ:
        _ask(given)
        with pytest.MonkeyPatch.context() as patch:
            if SETTING not in os.environ:  # the cluster itself knows its subnet
                patch.setenv(SETTING, str(Path(given).parent))
            yield
        return
    number, claim = claim_number()
    folder = f"/var/tmp/hpctrain-test-cluster-{number}"
    with claim, pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, f"{folder}:10.77.{number}.0/24")
        tool("down")  # a process that was killed together with its `sh` may have left a cluster
        call("check")
        # The pipe closes when this process ends, also when it is killed or interrupted during `up`.
        # The child holds the socket, so the number stays taken until the cluster is down.
        end = subprocess.Popen(
            ["sh", "-c", 'read -r _; exec "$@" down', "sh", sys.executable, str(TOOL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[claim.fileno()],
            start_new_session=True,
        )
        try:
            call("up", f"--nodes={nodes}", *(f"--set={each}" for each in settings))
            patch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
            yield
        finally:
            end.communicate()


def _ask(conf: str) -> None:
    try:
        subprocess.run(["sinfo", "--noheader"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"the cluster of SLURM_CONF={conf} does not answer ({error})") from error


def claim_number() -> tuple[int, socket.socket]:
    """Return a number for a cluster and its subnet; it is taken as long as the socket is open."""
    for number in range(1, 255):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0hpctrain-test-cluster-{number}")
        except OSError:
            name.close()
        else:
            return number, name
    raise LaunchError("254 clusters for tests run on this machine")


def tool(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the cluster, with changes to the environment."""
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **env},
    )


def call(*arguments: str) -> str:
    """Return what a command of the cluster prints. LaunchError: it has failed."""
    done = tool(*arguments)
    if done.returncode:
        said = done.stderr.strip().removeprefix("slurm/dev-cluster: ")
        raise LaunchError(f"cluster {' '.join(arguments)}: {said}")
    return done.stdout
