"""Tests of the checks inside the ranks of a job, with faults planted in one of two ranks.

The two ranks are processes of this machine, and each says that it is a node of its own. Real nodes
are in test_nodes_cluster.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hpctrain.base.processes.causes import NODE
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config
from hpctrain.errors import NodeError
from hpctrain.insight import preflight as preflight_module
from hpctrain.insight.doctor.checks import gpu_health, installed
from hpctrain.insight.doctor.finding import Finding
from hpctrain.insight.monitor.nvidia import Nvidia
from hpctrain.insight.preflight import check_nodes, checked
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import verdict
from hpctrain.runs.state.end import End
from tests.doctor.asked import expected_of
from tests.monitor.nvml import Nvml
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def config(output: str, **launch: Any) -> Config:
    found = Config()
    found.output_dir, found.parallel.device, found.data.path = output, "cpu", ""
    for name, value in launch.items():
        setattr(found.launch, name, value)
    return found


def node(rank: int) -> RankInfo:
    return RankInfo("slurm", rank, 0, 0, 2, 1, 1, "127.0.0.1", 0, ())


def checks(output: str, fault: str) -> dict[str, dict[str, str]]:
    """Return what has not passed on each node."""
    rank = dist.get_rank()
    with (
        patch(
            "hpctrain.insight.doctor.probe.socket",
            SimpleNamespace(gethostname=lambda: f"node{rank}"),
        ),
        planted(fault if rank == 1 else "", rank),
    ):
        places = checked(expected_of(config(output)), node(rank), CPU, full=False)
    return {
        host: {f.check: f.result for f in each if f.result in ("warn", "fail")}
        for host, each in places.items()
    }


def planted(fault: str, rank: int) -> Any:
    """Return a context with a fault in this rank; every other rank has a GPU that is well."""
    if fault == "package":
        return patch.object(installed, "installed_version", lambda name: "0.0.1")
    nvml = Nvml()
    nvml.used = 0
    nvml.ecc = (0, 7) if fault == "ecc" else (0, 0)
    nvml.reasons = 0x40 if fault == "hot" else 0
    nvml.lost = {"GPU-a"} if fault == "lost" else set()
    own = gpu_health.checked

    def checked(uuids: list[str], first: int, _: Any, *, nccl: bool) -> Any:
        return own(["GPU-a"], first, Nvidia(nvml), nccl=nccl)

    return patch.object(gpu_health, "checked", checked)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", {}),
        ("package", {f"same {name}": "fail" for name in installed._PACKAGES}),
        ("ecc", {"GPU 0: ECC": "fail"}),
        ("hot", {"GPU 0: throttling": "fail"}),
        ("lost", {"GPU 0": "fail"}),
    ],
)
def test_the_node_with_a_fault_is_named(
    fault: str, expected: dict[str, str], tmp_path: Path
) -> None:
    found, other = run_ranks(checks, 2, str(tmp_path), fault)
    assert other == found  # all ranks find the same
    assert found["node1"] == expected
    assert found["node0"] == {}


def refused(output: str, mode: str) -> str:
    ranks = RankInfo("slurm", dist.get_rank(), dist.get_rank(), 0, 2, 2, 1, "127.0.0.1", 0, ())
    too_many = config(output, preflight=mode, cpus_per_task=10**6)
    try:
        sections = too_many.parallel, too_many.network, too_many.data
        check_nodes(JobRequest.of(too_many), *sections, RunDir(Path(output) / "run"), ranks, CPU)
    except NodeError as error:
        return str(error)
    return ""


def test_a_requeued_job_avoids_the_node_whose_own_gpus_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other jobs of one node may take such a node."""
    (tmp_path / "run").mkdir()
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        verdict, "requeue_from_rank", lambda job, exclude: asked.append((job, exclude))
    )
    differ = Finding("same GPUs: name", "fail", "NVIDIA A100", "NVIDIA H100", "")
    ranks = RankInfo("slurm", 0, 0, 0, 2, 2, 1, "127.0.0.1", 0, (), job_id="7")
    mine, run = JobRequest.of(config(str(tmp_path))), RunDir(tmp_path / "run")
    run.update(attempts=[])
    run.begin_attempt(job_id="7", first_step=0)
    bad = preflight_module._remember(str(tmp_path), ranks, {"node1": [differ]})
    end = End(NODE, "NodeError: node1: same GPUs", hosts=tuple(bad), bad=True)
    verdict.go_on(run, ranks, end, mine)
    assert asked == [("7", "node1")]
    assert (run.read().attempt.verdict, run.read().attempt.avoid) == ("requeue", ("node1",))
    assert excluded_hosts.avoided(mine) == []


def test_all_ranks_refuse_a_node_together(tmp_path: Path) -> None:
    """Rank 0 records what follows before any rank ends, although no scontrol answers here."""
    (tmp_path / "run").mkdir()
    run = RunDir(tmp_path / "run")
    run.update(attempts=[])
    run.begin_attempt(first_step=0)
    said = run_ranks(refused, 2, str(tmp_path), "quick")
    assert said[0] == said[1]
    assert "CPU cores" in said[0]
    now = run.read().attempt
    assert (now.verdict, now.cause, now.state) == ("requeue", "node", "interrupted")
    assert list(now.avoid) == list(excluded_hosts.read(str(tmp_path)))
    assert run_ranks(refused, 2, str(tmp_path), "off") == [""] * 2


@pytest.mark.parametrize(
    ("reason", "hosts", "expected"),
    [
        ("", ["n2"], ["n2"]),  # the other node shows all of its GPUs
        ("", ["n1", "n2"], []),  # torch or the config may be to blame
        ("GPU fault on n1: RuntimeError", ["n1", "n2"], ["n1"]),
    ],
)
def test_a_node_that_shows_fewer_gpus_is_left(
    reason: str, hosts: list[str], expected: list[str], tmp_path: Path
) -> None:
    ranks = RankInfo("slurm", 0, 0, 0, 2, 1, 2, "127.0.0.1", 0, ("n1", "n2"))
    attempts = [SimpleNamespace(reason=reason), SimpleNamespace(reason="")]
    run: Any = SimpleNamespace(read=lambda: SimpleNamespace(attempts=attempts))
    assert (
        preflight_module.lost_gpu(JobRequest.of(config(str(tmp_path))), run, ranks, hosts)
        == expected
    )
    assert sorted(excluded_hosts.read(str(tmp_path))) == expected
    off = JobRequest.of(config(str(tmp_path), preflight="off"))
    assert preflight_module.lost_gpu(off, run, ranks, hosts) == []
