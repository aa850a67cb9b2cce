"""Faults on the nodes of a real Slurm, and what becomes of the jobs: exclusion, requeue, budget.

GPUs are planted (tests/doctor/planted_gpus.py), as there are none. Links are made slow by the
kernel, and ports are really in use.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpctrain.rendezvous.port import master_port
from hpctrain.slurm import excluded_hosts
from tests import cluster
from tests.conftest import run_json, run_module, runs
from tests.doctor.planted_gpus import PlantedGpus
from tests.doctor.test_nodes_cluster import doctor, failures, slow_link

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
LISTENER = """\
import socket, sys

held = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def faults() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def taken(node: str, ports: list[int]) -> Callable[[], None]:
    """Listen on ports of a node; return what ends that."""
    net = f"--net={Path(os.environ['SLURM_CONF']).parent}/net/{node}"
    process = subprocess.Popen(
        ["nsenter", net, sys.executable, "-c", LISTENER, *map(str, ports)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    said = process.stdout.readline()

    def end() -> None:
        process.communicate()

    if said != b"listening\n":
        end()
        pytest.fail(f"{ports} are taken by somebody else")
    return end


def next_jobs() -> list[int]:
    """Return the numbers that the next jobs will have."""
    last = int(cluster.sbatch("true", "--output=/dev/null"))
    cluster.wait_for_end([str(last)])
    return [last + number for number in range(1, 6)]


def restarted(run: Path, job: str, attempts: int) -> dict[str, Any]:
    """Wait until so many attempts have ended with a requeue, let the job start, return run.json."""

    def over() -> bool:
        found = run_json(run)["attempts"]
        return len(found) == attempts and found[-1].get("state") == "interrupted"

    cluster.wait_for(over, 240, f"the end of attempt {attempts}")
    assert cluster.tool("hurry", job).returncode == 0
    return run_json(run)


def test_nvml_faults_on_nodes_and_the_budget_of_a_job(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each fault has its verdict; a job leaves three bad nodes in a row, and no more."""
    gpus, output = PlantedGpus(tmp_path / "gpus"), str(tmp_path / "runs")
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={output}", "tracking=off"]
    where += ["launch.gpus_per_node=2", "launch.snapshot=off", gpus.override]
    code, well = doctor(capsys, "--nodes", "4", *where)
    assert failures(well) == {f"node{n}": set() for n in (1, 2, 3, 4)}, well
    assert code == 0

    gpus.let_be(
        {
            "node1": {"ecc": [0, 3]},
            "node2": {"reasons": 0x40},
            "node3": {"missing": 1},
            "node4": {"lost": ["GPU-b"]},
        }
    )
    code, ill = doctor(capsys, "--nodes", "4", *where)
    assert code == 9
    assert failures(ill) == {
        "node1": {"GPU 0: ECC", "GPU 1: ECC"},
        "node2": {"GPU 0: throttling", "GPU 1: throttling"},
        "node3": {"number of GPUs"},
        "node4": {"GPU 1"},
    }
    assert {*excluded_hosts.read(output)} == {"node1", "node2", "node3", "node4"}
    (Path(output) / "doctor" / "excluded.json").unlink()

    run_module("hpctrain", "-m", *where, "train.max_steps=3")
    (run,) = runs(Path(output))
    job = cluster.job_id(run)
    for attempt in (1, 2, 3):
        restarted(run, job, attempt)
    assert cluster.wait_for_end([job]) == {job: "FAILED"}
    record = run_json(run)
    assert [one["hosts"] for one in record["attempts"]] == [[f"node{n}"] for n in (1, 2, 3, 4)]
    said = [one.get("reason") or one.get("error") for one in record["attempts"]]
    words = ("uncorrected", "heat (hardware)", "number of GPUs: 1 (expected: 2)", "GPU-b")
    assert all(word in text for word, text in zip(words, said, strict=True)), said
    assert record["state"] == "failed"
    log = (run / "logs" / f"{job}.rank0.log").read_text()
    assert "3 restarts in a row have met bad nodes: not requeued" in log

    gpus.let_be({})
    code, _ = doctor(capsys, "--nodes", "4", *where)
    assert code == 0
    assert excluded_hosts.read(output) == {}
    run_module("hpctrain", "resume", run.name, "--dir", output)
    job = cluster.job_id(run)
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    assert run_json(run)["state"] == "finished"


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_gpu_that_is_lost_for_good(node: str, digits: Path, tmp_path: Path) -> None:
    """The node of rank 0, or the other one, is left, though its ranks end before their checks."""
    gpus, output = PlantedGpus(tmp_path / "gpus"), str(tmp_path / "runs")
    gpus.let_be({node: {"dies": True}})
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={output}", "tracking=off"]
    where += ["launch.gpus_per_node=2", "launch.snapshot=off", gpus.override]
    run_module("hpctrain", "-m", *where, "train.max_steps=3", "launch.nodes=2")
    (run,) = runs(Path(output))
    job = cluster.job_id(run)
    (first,) = restarted(run, job, 1)["attempts"]
    assert first["reason"] == f"GPU fault on {node}: RuntimeError: CUDA error: unknown error"
    assert excluded_hosts.read(output) == {}
    second = restarted(run, job, 2)["attempts"][1]
    assert "torch sees no GPU here" in second["reason"]
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    assert {*excluded_hosts.read(output)} == {node}
    hosts = [one["hosts"] for one in run_json(run)["attempts"]]
    assert hosts[:2] == [["node1", "node2"]] * 2
    assert len(hosts) == 3
    assert node not in hosts[2]


def test_a_port_in_use(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: ExitStack
) -> None:
    """`doctor` names it; a run starts again with another port, and excludes no node."""
    output = str(tmp_path / "runs")
    where = [f"output_dir={output}", "launch.snapshot=off"]
    faults.callback(taken("node1", [master_port(job) for job in next_jobs()]))
    code, found = doctor(capsys, "--nodes", "2", *where)
    assert code == 9
    assert failures(found)["node1"] == {"port of rank 0"}
    (taken_port,) = (
        one for one in found["places"]["node1"]["findings"] if one["check"] == "port of rank 0"
    )
    assert "on node1 is taken" in taken_port["found"]
    assert excluded_hosts.read(output) == {}

    faults.close()
    faults.callback(taken("node1", [master_port(job) for job in next_jobs()]))
    where += ["experiment=digits", f"data.path={digits}", "tracking=off", "train.max_steps=3"]
    run_module("hpctrain", "-m", *where, "launch.nodes=2")
    (run,) = runs(Path(output))
    job = cluster.job_id(run)
    assert "is taken" in restarted(run, job, 1)["attempts"][0]["reason"]
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    record = run_json(run)
    assert (record["state"], len(record["attempts"])) == ("finished", 2)
    assert record["attempts"][1]["hosts"] == ["node1", "node2"]
    assert excluded_hosts.read(output) == {}


def test_the_full_check_of_a_job_finds_a_slow_link(
    digits: Path, tmp_path: Path, faults: ExitStack
) -> None:
    """The job measures its nodes, leaves the slow one, and trains on the others."""
    output = str(tmp_path / "runs")
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={output}", "tracking=off"]
    where += ["launch.snapshot=off", "train.max_steps=3", "train.global_batch_size=48"]
    faults.callback(slow_link("node2"))
    run_module("hpctrain", "-m", *where, "launch.preflight=full", "launch.nodes=3")
    (run,) = runs(Path(output))
    job = cluster.job_id(run)
    (first,) = restarted(run, job, 1)["attempts"]
    assert "node2: link to other nodes" in first["reason"]
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    record = run_json(run)
    assert (record["state"], record["attempts"][1]["hosts"]) == (
        "finished",
        ["node1", "node3", "node4"],
    )
    assert {*excluded_hosts.read(output)} == {"node2"}
    log = (run / "logs" / f"{job}.rank0.log").read_text()
    assert re.search(r"launch\.preflight=full: 3 nodes checked in [\d.]+ s", log), log
