"""`init-site` on real Slurms: the development cluster as it is, and in five other shapes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpctrain.insight.site import site_file
from tests import cluster
from tests.conftest import Completed, only_run, run_json, run_module

pytestmark = pytest.mark.slurm
Train = Callable[..., Completed]


@pytest.mark.usefixtures("empty_queue")
def test_the_written_file_trains(train: Train, tmp_path: Path) -> None:
    done = run_module("hpctrain", "init-site", cwd=tmp_path)
    file = tmp_path / "conf/site/mine.yaml"
    assert done.stdout == file.read_text()
    site = site_file.read(file)
    assert (site.partition, site.gpu_option) == ("batch", "gpus-per-node")
    assert "launch.tasks_per_node=2 launch.gpus_per_node=2 launch.cpus_per_task=4" in done.stdout
    assert (
        "all that could be checked fits"
        in run_module("hpctrain", "init-site", "--check", cwd=tmp_path).stdout
    )
    own = (f"--config-dir={tmp_path}/conf", "site=mine", "launch.mem_gb=1", "tracking=off")
    train(
        "-m",
        *own,
        "train.max_steps=2",
        "launch.wait=true",
        "launch.gpus_per_node=1",
        "parallel.device=cpu",
    )
    assert run_json(only_run(tmp_path))["state"] == "finished"
    file.write_text(file.read_text().replace("partition: batch", "partition: gone"))
    done = run_module("hpctrain", "init-site", "--check", cwd=tmp_path, code=2)
    assert "site.partition: there is no gone for you, but batch, preemptible" in done.stdout


NODES = "NodeName=node[1-2] NodeAddr={net}.[11-12] RealMemory=16000 State=UNKNOWN "
ACCOUNTS = (
    ("sacctmgr", "--immediate", "add", "account", "physics"),
    ("sacctmgr", "--immediate", "add", "qos", "long"),
    ("sacctmgr", "--immediate", "add", "user", "root", "account=physics", "qos=long,normal"),
)
# The lines of slurm.conf, what is changed later, what is known, and what the file says.
SHAPES: dict[str, tuple[list[str], tuple[tuple[str, ...], ...], list[str], list[str]]] = {
    "whole nodes": (
        ["PartitionName=gpu Default=YES Nodes=ALL OverSubscribe=EXCLUSIVE MaxTime=120"],
        (),
        [],
        [
            "# sinfo: there is no other\npartition: gpu\n",
            "# launch.time_min is at most 120 (sinfo)\n",
            "# jobs get whole nodes (sinfo: EXCLUSIVE)\n",
        ],
    ),
    "threads and features": (
        [NODES + "Sockets=1 CoresPerSocket=8 ThreadsPerCore=2 Gres=gpu:2,shard:8 Feature=a100,hbm"],
        (),
        [],
        [
            "# launch.tasks_per_node=2 launch.gpus_per_node=2 launch.cpus_per_task=4\n",
            "# a core has 2 threads: sbatch: {hint: nomultithread} (sinfo)\n",
            "# sinfo: these nodes have a100, hbm; not known: which of them you need\n",
        ],
    ),
    "no GPUs": (
        [NODES + "CPUs=8", "PartitionName=cpu Nodes=ALL"],
        (),
        [],
        [
            "# launch.tasks_per_node=1 launch.gpus_per_node=0 launch.cpus_per_task=8\n",
            "# sinfo: no node has GPUs\ngpu_type: null\n",
        ],
    ),
    "a closed partition": (
        [],
        (("scontrol", "update", "PartitionName=batch", "State=DOWN"),),
        [],
        ["# sinfo: there is no other\npartition: preemptible\n"],
    ),
    "accounts and QOS": (
        ["AccountingStorageEnforce=associations,qos"],
        ACCOUNTS,
        ["account=physics", "qos=long"],
        [
            "# sacctmgr lists 2 for you: you have said so\naccount: physics\n",
            "# sacctmgr: you have said so\nqos: long\n",
        ],
    ),
}


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], None]]:
    """A function that starts a second cluster, with these lines in its slurm.conf."""
    cluster.require()
    folder, net = f"/var/tmp/hpctrain-test-shape-{cluster.number()}", f"10.78.{cluster.number()}"
    monkeypatch.setenv(cluster.SETTING, f"{folder}:{net}.0/24")

    def start(lines: list[str]) -> None:
        given = [word for line in lines for word in ("--set", line.format(net=net))]
        up = cluster.tool("up", "--nodes", "2", *given)
        assert up.returncode == 0, up.stderr
        monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")

    cluster.tool("down")
    yield start
    cluster.tool("down")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape(shape: str, shaped: Callable[[list[str]], None], tmp_path: Path) -> None:
    lines, accounting, given, said = SHAPES[shape]
    shaped(lines)
    for command in accounting:
        cluster.slurm(*command)
    done = run_module("hpctrain", "init-site", *given, cwd=tmp_path)
    assert [text for text in said if text not in done.stdout] == []
    done = run_module("hpctrain", "init-site", "--check", cwd=tmp_path)
    assert "all that could be checked fits" in done.stdout
