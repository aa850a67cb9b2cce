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
def running() -> Iterator[None]:
    """Require a running cluster, and heal it before and after each test."""
    cluster.require()
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


def subnet() -> str:
    """Return the first three numbers of the addresses of the cluster that the tests use."""
    config = Path(os.environ["SLURM_CONF"]).read_text()
    return re.findall(r"NodeAddr=(.*)\.\d+ ", config)[0]


def alive(pid: int) -> bool:
    try:
        # The state follows the name, which may hold any characters. A zombie counts as dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_run_on_four_hosts() -> None:
    hosts = cluster.slurm("srun", "-N4", "--ntasks-per-node=2", "hostname").split()
    assert sorted(hosts) == sorted(["node1", "node2", "node3", "node4"] * 2)


def test_nodes_reach_each_other_by_name(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, socket, time
if os.environ["SLURM_PROCID"] == "0":
    with socket.create_server(("", 7000)) as server:
        server.settimeout(20)
        print(server.accept()[1][0])
else:
    for _ in range(100):
        try:
            socket.create_connection(("node1", 7000), timeout=1)
            break
        except OSError:
            time.sleep(0.1)
"""
    )
    said = cluster.slurm("srun", "-N2", "--nodelist=node[1-2]", "python3", str(program))
    assert said == f"{subnet()}.12"


def test_gpus_are_given_to_jobs() -> None:
    mask = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert cluster.slurm("srun", "--gpus-per-node=2", *mask) == "0,1"
    assert cluster.slurm("srun", "--gpus-per-node=1", *mask) == "0"
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        cluster.slurm("srun", "--gpus-per-node=3", *mask)


def test_accounting_knows_an_ended_job() -> None:
    job = cluster.sbatch("exit 3", "--output=/dev/null", "--mem=1000", "--job-name=three")
    cluster.wait_for(lambda: cluster.job_state(job) == "FAILED", 90, f"job {job} fails")
    ask = ("sacct", "-X", "-n", "-P", "--jobs", job, "--format=JobName,ExitCode")
    # If a job ends at once, sacct knows its name only some seconds after the job itself.
    cluster.wait_for(lambda: cluster.slurm(*ask) == "three|3:0", 90, f"job {job} in sacct")


def test_a_job_without_the_environment_finds_the_cluster(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # The --export of sbatch also applies to srun in the job, unless srun has its own --export.
    script = "srun --export=ALL hostname"
    job = cluster.sbatch(script, "--export=NONE", f"--output={out}", "--nodelist=node3")
    cluster.wait_for(lambda: cluster.job_state(job) == "COMPLETED", 90, f"job {job} ends")
    assert out.read_text() == "node3\n"


def test_scratch_is_one_path_and_a_folder_per_node(tmp_path: Path) -> None:
    scratch = Path(os.environ["SLURM_CONF"]).parent / "scratch"
    program = f"echo $SLURMD_NODENAME > {scratch}/name; sleep 1; cat {scratch}/name"
    assert sorted(cluster.slurm("srun", "-N2", "sh", "-c", program).split()) == ["node1", "node2"]


@pytest.mark.slow
def test_preempted_then_hurried(tmp_path: Path) -> None:
    """A preempted job gets SIGTERM and is requeued, and `hurry` starts it again as restart 1."""
    out = tmp_path / "out"
    script = (
        "trap 'echo terminated' TERM; echo start ${SLURM_RESTART_COUNT:-0};"
        "while :; do sleep 0.2; done"
    )
    options = ("--partition=preemptible", f"--output={out}", "--open-mode=append", "-N2")
    job = cluster.sbatch(f'exec srun --open-mode=append sh -c "{script}"', *options)
    try:
        cluster.wait_for(lambda: out.exists() and "start" in out.read_text(), 90, "the job starts")
        done = cluster.tool("preempt", job)
        assert done.returncode == 0, done.stderr
        assert f"from job {job}" in done.stdout
        cluster.wait_for(lambda: "terminated" in out.read_text(), 10, "SIGTERM")
        done = cluster.tool("hurry", job)
        assert done.returncode == 0, done.stderr
        cluster.wait_for(lambda: "start 1" in out.read_text(), 90, "the second start")
        assert "Restarts=1" in cluster.slurm("scontrol", "show", "job", job)
    finally:
        cluster.slurm("scancel", job)


def test_preempt_and_hurry_refuse_other_jobs() -> None:
    job = cluster.sbatch("sleep 60", "--output=/dev/null")
    try:
        cluster.wait_for(lambda: cluster.job_state(job) == "RUNNING", 90, "the job starts")
        done = cluster.tool("preempt", job)
        assert done.returncode == 1
        assert "RUNNING in batch" in done.stderr
    finally:
        cluster.slurm("scancel", job)
    assert cluster.tool("hurry", "999999").returncode == 1


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


@pytest.mark.slow
def test_a_cut_node_loses_its_job_and_is_healed() -> None:
    job = cluster.sbatch("sleep 600", "--output=/dev/null", "--nodelist=node4", "--no-requeue")
    cluster.wait_for(lambda: cluster.job_state(job) == "RUNNING", 90, "the job starts")
    assert cluster.tool("cut", "node4").returncode == 0
    connect = "import socket; socket.create_connection(('node4', 6818), timeout=1)"
    on_node1 = ("exec", "--node", "node1", "--", "python3", "-c", connect)
    assert cluster.tool(*on_node1).returncode == 1
    cluster.wait_for(lambda: cluster.job_state(job) == "NODE_FAIL", 180, "the node is given up")
    done = cluster.tool("heal", "node4")
    assert done.returncode == 0, done.stderr
    assert cluster.tool(*on_node1).returncode == 0
    assert cluster.slurm("srun", "--nodelist=node4", "hostname") == "node4"


def test_up_again_changes_nothing() -> None:
    before = cluster.tool("status").stdout.split("\n\n")[0]
    done = cluster.tool("up")
    assert (done.returncode, done.stdout) == (0, "already up: 4 nodes\n")
    assert cluster.tool("status").stdout.split("\n\n")[0] == before
    assert cluster.tool("up", "--nodes", "2").returncode == 1


def test_env_names_the_configuration() -> None:
    assert cluster.tool("env").stdout == f"export SLURM_CONF={os.environ['SLURM_CONF']}\n"
    said = cluster.tool("exec", "--", "sh", "-c", "echo $SLURM_CONF", SLURM_CONF="elsewhere")
    assert said.stdout.strip() == os.environ["SLURM_CONF"]


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


def test_a_subnet_in_use_is_refused() -> None:
    done = cluster.tool("up", HPCTRAIN_DEV_CLUSTER=f"/tmp/x:{subnet()}.0/25")
    assert done.returncode == 2
    done = cluster.tool("up", HPCTRAIN_DEV_CLUSTER=f"/tmp/x:{subnet()}.0/24")
    assert done.returncode == 1
    assert f"{subnet()}.0/24 is already in use here" in done.stderr
    assert cluster.slurm("sinfo", "--noheader")


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
def test_somebody_elses_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for command in ("up", "down"):
        done = cluster.tool(command, HPCTRAIN_DEV_CLUSTER=f"{tmp_path}:10.78.0.0/24")
        assert done.returncode == 1
        assert "this tool has not made it" in done.stderr
    assert (tmp_path / "thesis.tex").exists()


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


@pytest.mark.slow
def test_a_daemon_that_fails_is_shown_and_all_is_cleaned(
    second: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    fake = tmp_path / "slurmd"
    fake.write_text('#!/bin/sh\n[ "$1" = -V ] && echo slurm 22.05.8 && exit\necho boom\nexit 1\n')
    fake.chmod(0o755)
    code, said = second("up", "--nodes", "1", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 1
    assert "slurmd-node1 ended" in said
    assert "boom" in said
    assert "Traceback" not in said
    assert left_behind(tmp_path) == []


def test_a_copy_of_the_folder_works_from_anywhere(tmp_path: Path) -> None:
    compiled = shutil.ignore_patterns("__pycache__")  # other tests import the package
    shutil.copytree(cluster.TOOL.parent, tmp_path / "copy", ignore=compiled)
    (tmp_path / "link").symlink_to(tmp_path / "copy" / "dev-cluster")
    # Without the packages that are installed here: the tool needs nothing but Python.
    command = ["/usr/bin/env", "python3", "-I", "-S", str(tmp_path / "link"), "status"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "slurmctld" in done.stdout
    assert not list((tmp_path / "copy").rglob("__pycache__"))  # root would own it
