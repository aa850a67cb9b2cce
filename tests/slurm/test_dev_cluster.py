"""`slurm/dev-cluster` starts, damages, heals and removes a Slurm cluster for development."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cluster

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def running(slurm_cluster: object) -> Iterator[None]:
    """Require a running cluster, and heal it before and after each test."""
    cluster.heal()
    yield
    cluster.heal()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a short path, because a cluster keeps Unix sockets in its folder."""
    return tmp_path_factory.mktemp("up")


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """Yield a function that runs the tool for a second cluster, beside that of the other tests.

    The function returns (exit code, standard output and error).
    """
    setting = {cluster.SETTING: f"{tmp_path}/second:10.78.{cluster.number()}.0/24"}

    def tool(*arguments: str, **env: str) -> tuple[int, str]:
        done = cluster.tool(*arguments, **setting, **env)
        return done.returncode, done.stdout + done.stderr

    yield tool
    assert tool("down") == (0, "down\n")


def left_behind(tmp_path: Path) -> list[str]:
    """Return the network links, the mounts and the files of the second cluster."""
    # Other tests start and stop clusters meanwhile. The address shows whose link it is.
    addresses = subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True)
    links = re.findall(rf"inet 10\.78\.{cluster.number()}\..*", addresses.stdout)
    mounts = [m for m in Path("/proc/self/mounts").read_text().splitlines() if str(tmp_path) in m]
    return links + mounts + [str(path) for path in tmp_path.glob("second*")]


def alive(pid: int) -> bool:
    try:
        # The state follows the name, which may hold any characters. A zombie counts as dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_job_without_the_environment_finds_the_cluster(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # The --export of sbatch also applies to srun in the job, unless srun has its own --export.
    script = "srun --export=ALL hostname"
    job = cluster.sbatch(script, "--export=NONE", f"--output={out}", "--nodelist=node3")
    cluster.wait_for(lambda: cluster.job_state(job) == "COMPLETED", 90, f"job {job} ends")
    assert out.read_text() == "node3\n"


def test_a_killed_daemon_is_healed_and_its_job_goes_on() -> None:
    job = cluster.sbatch("sleep 60", "--output=/dev/null", "--nodelist=node4")
    try:
        cluster.wait_for(lambda: cluster.job_state(job) == "RUNNING", 90, "the job starts")
        assert cluster.tool("kill-daemon", "node4").returncode == 0
        status = cluster.tool("status")
        assert status.returncode == 1
        assert "hurt: node4" in status.stdout
        assert cluster.tool("heal", "node4").returncode == 0
        assert cluster.tool("status").returncode == 0
        assert cluster.job_state(job) == "RUNNING"
    finally:
        cluster.slurm("scancel", job)


def test_every_user_of_the_machine_may_use_it_and_the_disks_of_its_nodes() -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    scratch = Path(os.environ["SLURM_CONF"]).parent / "scratch"
    script = f"touch {scratch}/mine && id -u && rm {scratch}/mine"
    assert cluster.slurm(*nobody, "srun", "--chdir=/", "sh", "-c", script) == "65534"


@pytest.mark.parametrize("command", [["cut", "node9"], ["up", "--nodes", "0"], ["dance"], []])
def test_usage_errors(command: list[str]) -> None:
    done = cluster.tool(*command)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("setting", ["relative", "/" + "x" * 70, "/tmp/x:10.0.0.0/30", "/tmp/x:y"])
def test_bad_settings_are_explained(setting: str) -> None:
    done = cluster.tool("check", HPCTRAIN_DEV_CLUSTER=setting)
    assert done.returncode == 2
    assert f"HPCTRAIN_DEV_CLUSTER={setting}: expected FOLDER[:SUBNET]" in done.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(cluster.TOOL), "check"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "apt-get install --no-install-recommends slurmctld slurmd slurmdbd" in done.stderr


def test_a_missing_right_is_named() -> None:
    nobody = ["setpriv", "--reuid=65534", "--clear-groups", "/usr/bin/python3"]
    # The user `nobody` may be unable to read the tool where it is.
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(cluster.TOOL.parent, Path(folder) / "slurm")
        Path(folder).chmod(0o755)
        for command in ("check", "up", "status"):
            called = [*nobody, str(copy / "dev-cluster"), command]
            done = subprocess.run(called, capture_output=True, text=True)
            assert (done.returncode, "needs root" in done.stderr) == (4, True), command


@pytest.mark.slow
def test_from_up_to_down_nothing_is_left(
    second: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    assert second("status")[0] == 1
    assert second("env")[0] == 1
    code, said = second("up", "--nodes", "1")
    assert code == 0, said
    assert second("up") == (0, "already up: 1 nodes\n")

    # A process that has left the session and the process tree of its job must be found as well.
    pidfile = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pidfile}; exec sleep 1000' & sleep 1000"
    code, said = second("exec", "--", "sbatch", "-o", "/dev/null", "--wrap", script)
    assert code == 0, said
    cluster.wait_for(lambda: pidfile.exists() and pidfile.read_text(), 90, "the job runs")

    # A controller that has died is started again, and the job goes on. Slurm saves what it knows of
    # the jobs some seconds after a change by a user.
    job = second("exec", "--", "squeue", "-h", "-o", "%i")[1].strip()
    changed = time.time()
    assert second("exec", "--", "scontrol", "update", f"JobId={job}", "Comment=mine")[0] == 0
    state = tmp_path / "second" / "state" / "job_state"
    cluster.wait_for(lambda: state.exists() and state.stat().st_mtime > changed, 30, "its state")
    for daemon in ("slurmctld", "slurmdbd"):
        (pid,) = re.findall(rf"head +{daemon} +(\d+)", second("status")[1])
        os.kill(int(pid), signal.SIGKILL)
        code, said = second("up")
        assert (code, said.splitlines()) == (
            0,
            [f"started again, with queue and accounting: {daemon}", "already up: 1 nodes"],
        )
        assert alive(int(pidfile.read_text()))
        shown = second("exec", "--", "squeue", "-h", "-o", "%i %T")
        assert shown == (0, f"{job} RUNNING\n")
    shown = second("exec", "--", "sacct", "-X", "-n", "-P", "-o", "JobID,State")
    assert shown == (0, f"{job}|RUNNING\n")

    # After all daemons were killed, `up` removes what is left and starts the cluster again.
    words = second("status")[1].split("\n\n")[0].split()
    daemons = [int(word) for word in words if word.isdigit()]
    assert len(daemons) == 5
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)
    assert second("status")[0] == 1
    assert alive(int(pidfile.read_text()))
    code, said = second("up", "--nodes", "1")
    assert code == 0, said
    assert said.startswith("no daemon is left on head: its queue, accounting and jobs are deleted")
    assert not alive(int(pidfile.read_text()))
    assert second("status")[0] == 0
    assert second("exec", "--", "srun", "hostname") == (0, "node1\n")

    words = second("status")[1].split("\n\n")[0].split()
    daemons = [int(word) for word in words if word.isdigit()]
    assert second("down", "--keep-logs")[0] == 0
    assert not any(alive(pid) for pid in daemons)
    assert left_behind(tmp_path) == [f"{tmp_path}/second.logs"]
    assert (tmp_path / "second.logs" / "slurmctld-head").exists()
