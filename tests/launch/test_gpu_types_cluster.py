"""`launch.gpu_type` on a real Slurm, whose nodes have the features of two kinds of GPUs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.run_record import ChosenLayout
from tests import cluster
from tests.conftest import Completed, run_json, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
FEATURES = {"node1": "ib,a100", "node2": "ib,h100", "node3": "ib,h100", "node4": "eth,h100"}
# What a driver would tell. With two ranks the figures of the one give ZeRO-1, of the other DDP.
NAMES = """\
import socket, sys
if "hpctrain.plan.by_kind" in sys.orig_argv and "--run" in sys.orig_argv:
    from types import SimpleNamespace
    from hpctrain.monitor import gpus
    name = "NVIDIA A100-SXM4-80GB" if socket.gethostname() == "node1" else "NVIDIA H100"
    gpus.Gpus = lambda uuids: SimpleNamespace(facts={"gpu_0": name})
"""


@pytest.fixture
def features(empty_queue: None) -> None:
    for node, names in FEATURES.items():
        both = (f"AvailableFeatures={names}", f"ActiveFeatures={names}")
        cluster.slurm("scontrol", "update", f"NodeName={node}", *both)


@pytest.mark.usefixtures("features")
def test_all_nodes_are_of_one_kind(train: Callable[..., Completed], tmp_path: Path) -> None:
    """The nodes have no real GPUs, so the job says that it does not know them, and goes on."""
    done = train(
        *("-m", "launch.gpu_type=[a100,h100]", "launch.nodes=2", "launch.gpus_per_node=1"),
        *(
            "site.constraint=ib|eth",
            "parallel.device=cpu",
            "launch.preflight=off",
            "train.max_steps=3",
            "tracking=off",
        ),
    )
    assert "on h100: NVIDIA H100" in done.stderr
    jobs = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for_end(jobs)
    (run,) = runs(tmp_path / "runs")
    record = run_json(run)
    assert (record["state"], record["attempts"][0]["hosts"]) == ("finished", ["node2", "node3"])
    (log,) = (tmp_path / "runs" / "sweeps").glob("*/array-0/batch/*.log")
    assert "launch.gpu_type: '' is no known GPU" in log.read_text()


@pytest.mark.usefixtures("features")
def test_a_requeue_to_another_kind_changes_the_layout_and_no_number(
    train: Callable[..., Completed], digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced = cluster.Paced(tmp_path / "code", monkeypatch)
    (tmp_path / "code" / "sitecustomize.py").write_text(NAMES)
    keys = (paced.task, "train.max_steps=120", "checkpoint.every_steps=10", "tracking=off")
    others = "NodeName=node[2-4]"
    cluster.slurm("scontrol", "update", others, "State=DRAIN", "Reason=test")
    try:
        train(
            *("-m", "launch.gpu_type=[a100_80:a100,h100_64:h100]", "launch.gpus_per_node=2"),
            *("launch.tasks_per_node=2", "site.partition=preemptible", "parallel.device=cpu"),
            *("launch.preflight=off", *keys),
        )
        (job,), (run,) = cluster.job_ids(tmp_path / "runs"), runs(tmp_path / "runs")
        cluster.wait_for((run / "layout.json").exists, 400, "the choice of the job")
        cluster.wait_for_step(run, 20)
        first = ChosenLayout.of(run)
        assert cluster.tool("preempt", job).returncode == 0
        cluster.wait_for(lambda: cluster.job_state(job) == "PENDING", 180, "the requeue")
        cluster.slurm("scontrol", "update", others, "State=UNDRAIN")
        cluster.slurm("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=test")
        paced.go()
        assert cluster.tool("hurry", job).returncode == 0
        assert cluster.wait_for_end([job], timeout=600) == {job: "COMPLETED"}
    finally:
        cluster.slurm("scontrol", "update", "NodeName=node[1-4]", "State=UNDRAIN")
    second, record = ChosenLayout.of(run), run_json(run)
    assert first.text.startswith("NVIDIA A100 SXM 80 GB: zero1 on 2 ranks")
    assert second.text.startswith("NVIDIA H100 SXM 64 GB: ddp on 2 ranks")
    assert first.overrides != second.overrides
    assert record["attempts"][1]["first_step"] >= 20
    where = ("experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/alone")
    run_module("hpctrain", *where, *keys, "parallel.device=cpu")
    (alone,) = runs(tmp_path / "alone")
    assert alone.name == run.name
    expected = run_json(alone)["result"]
    for name in ("train/loss", "val/loss"):
        assert record["result"][name] == pytest.approx(expected[name], rel=1e-6)
