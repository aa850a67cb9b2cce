"""Ranks, hostlists and ports are read from the variables that real launchers set."""

import socket
import subprocess

import pytest

from hpctrain.cluster.ranks.hostlist import expand_hostlist
from hpctrain.cluster.ranks.port import listen, master_port
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import Config
from hpctrain.engine.job.here import _check_world
from hpctrain.errors import ConfigError, DistributedError

HOSTLISTS = {
    "node1": ["node1"],
    "node[1-3]": ["node1", "node2", "node3"],
    "node[007]": ["node007"],
    "node[08-11]": ["node08", "node09", "node10", "node11"],
    "rack[1-2]n[01-02]": ["rack1n01", "rack1n02", "rack2n01", "rack2n02"],
    "node[1-2]-ib": ["node1-ib", "node2-ib"],
    "a[1-2],b[3-4]": ["a1", "a2", "b3", "b4"],
    "n[001-003,7],gpu-a100": ["n001", "n002", "n003", "n7", "gpu-a100"],
    "gpu-a100": ["gpu-a100"],
    "n[9-10]": ["n9", "n10"],
}

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize("text", HOSTLISTS)
def test_hostlist(text: str) -> None:
    assert expand_hostlist(text) == HOSTLISTS[text]


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm_cluster")
@pytest.mark.parametrize("text", HOSTLISTS)
def test_hostlist_agrees_with_scontrol(text: str) -> None:
    answer = subprocess.run(
        ["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=True
    )
    if "Invalid hostlist" in answer.stderr:
        # Slurm 22.05 refuses a suffix after brackets; newer releases read it, and so do we.
        assert text == "node[1-2]-ib"
        return
    assert expand_hostlist(text) == answer.stdout.split()


@pytest.mark.parametrize("text", ["node[1-2", "node1]", "node[[1]]", "a,,b", "n[x]", "n[3-1]", ""])
def test_bad_hostlist(text: str) -> None:
    with pytest.raises(DistributedError, match="hostlist"):
        expand_hostlist(text)


def test_srun() -> None:
    ranks = RankInfo.from_env(STEP)
    assert (ranks.launcher, ranks.rank, ranks.world_size) == ("slurm", 3, 4)
    assert (ranks.local_rank, ranks.local_world_size) == (1, 2)
    assert (ranks.node_rank, ranks.num_nodes, ranks.master_addr) == (1, 2, "node1")
    assert ranks.job_id == "1234"
    assert "rank=3(4) local_rank=1(2)" in str(ranks)


def test_array_task_has_an_id_of_its_own() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "1230", "SLURM_ARRAY_TASK_ID": "4"}
    assert RankInfo.from_env(STEP | array).job_id == "1230_4"


def test_uneven_tasks() -> None:
    env = STEP | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    ranks = RankInfo.from_env(env | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    assert ranks.local_world_size == 1


def test_torchrun() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env |= {"GROUP_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29400"}
    ranks = RankInfo.from_env(STEP | env)
    assert (ranks.launcher, ranks.rank, ranks.num_nodes) == ("torchrun", 3, 2)
    assert (ranks.master_addr, ranks.master_port) == ("h", 29400)


def test_submitit_local() -> None:
    env = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_JOB_ID": "777",
    }
    ranks = RankInfo.from_env(env)
    assert (ranks.launcher, ranks.rank, ranks.world_size) == ("submitit-local", 1, 2)


def test_only_srun_makes_ranks() -> None:
    batch_script = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    salloc_shell = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}
    for env in (batch_script, salloc_shell):
        ranks = RankInfo.from_env(env)
        assert (ranks.launcher, ranks.world_size) == ("single", 1)
        assert ranks.idle_tasks(env) == 3
        assert ranks.idle_tasks(env | {"HPCTRAIN_LAUNCHER": "single"}) == 0


def test_the_shell_of_salloc_is_no_rank() -> None:
    shell = STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}
    ranks = RankInfo.from_env(shell)
    assert (ranks.launcher, ranks.world_size, ranks.idle_tasks(shell)) == ("single", 1, 3)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_training_in_such_a_shell_says_how_all_tasks_start(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and also where the config asks for the ranks that are missing."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    config = Config()
    config.launch.nodes = nodes
    with pytest.raises(ConfigError, match=r"4 tasks .*\(srun --overlap in .*=single to train"):
        _check_world(config, RankInfo.from_env())


def test_variables_that_another_program_has_left() -> None:
    left = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "1"}
    with pytest.raises(DistributedError, match=r"RANK=0 and WORLD_SIZE=4 .* task 3 of 4: another"):
        RankInfo.from_env(STEP | left)
    with pytest.raises(DistributedError, match=r"RANK=0 and WORLD_SIZE=1 are set"):
        RankInfo.from_env(STEP | left | {"WORLD_SIZE": "1"})
    assert RankInfo.from_env(STEP | left | {"HPCTRAIN_LAUNCHER": "slurm"}).rank == 3
    assert RankInfo.from_env(STEP | left | {"RANK": "3"}).rank == 3
    # Two ranks for each task: some launcher runs inside the tasks.
    assert RankInfo.from_env(STEP | left | {"RANK": "7", "WORLD_SIZE": "8"}).rank == 7
    with pytest.raises(DistributedError, match=r"MASTER_ADDR=127\.0\.0\.1 is another host on each"):
        RankInfo.from_env(STEP | {"MASTER_ADDR": "127.0.0.1"})


def test_detection_can_be_switched_off() -> None:
    assert RankInfo.from_env(STEP | {"HPCTRAIN_LAUNCHER": "single"}).world_size == 1
    with pytest.raises(DistributedError, match="HPCTRAIN_LAUNCHER=mpi: allowed are"):
        RankInfo.from_env({"HPCTRAIN_LAUNCHER": "mpi"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "4"}, "rank=4 of 4"),
        ({"SLURM_LOCALID": "2"}, "local_rank=2 of 2"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NUM_TASKS=5"),
        ({"SLURM_STEP_NUM_TASKS": "four"}, "SLURM_STEP_NUM_TASKS='four'"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, r"SLURM_STEP_TASKS_PER_NODE='2\(y2\)'"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set.*HPCTRAIN_LAUNCHER=single"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS is not set; HPCTRAIN_LAUNCHER=single"),
    ],
)
def test_impossible_combinations(change: dict[str, str], message: str) -> None:
    with pytest.raises(DistributedError, match=message):
        RankInfo.from_env(STEP | change)


def test_ports_differ_between_jobs_tasks_and_restarts() -> None:
    neighbours = [master_port(job, restart) for job in range(9000, 14000) for restart in range(4)]
    assert len(set(neighbours)) == len(neighbours)
    assert max(neighbours) < 32768  # Linux's ephemeral ports begin there
    assert min(neighbours) >= 1024


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_RESTART_COUNT"])
def test_ports_of_parallel_steps_and_of_restarts_differ(name: str) -> None:
    ports = {RankInfo.from_env(STEP | {name: str(number)}).master_port for number in range(64)}
    assert len(ports) == 64


def test_port_taken() -> None:
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "no-such-host.invalid"):
            with pytest.raises(DistributedError, match=f"port {port} on .* is taken .*MASTER_PORT"):
                listen(host, port, only_here=True)
    listen("127.0.0.1", port, only_here=True).close()


@pytest.mark.parametrize(
    ("host", "only_here", "expected"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        # Debian gives the name of the host this address, where another node would find itself.
        ("127.0.1.1", False, "everywhere"),
        ("192.0.2.1", False, "everywhere"),  # no interface here has it
        ("no-such-host.invalid", False, "everywhere"),
    ],
)
def test_rank_0_listens_only_where_the_ranks_connect(
    host: str, only_here: bool, expected: str
) -> None:
    with listen(host, 0, only_here) as listening:
        address = listening.getsockname()[0]
        assert ("everywhere" if address in ("::", "0.0.0.0") else address) == expected


def test_rank_0_listens_at_the_address_of_its_name() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel only chooses our address
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own = probe.getsockname()[0]
    with listen(own, 0, only_here=False) as listening:
        assert listening.getsockname()[0] == own
