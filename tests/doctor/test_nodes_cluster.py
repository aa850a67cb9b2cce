"""`doctor --nodes` and `launch.preflight` on a real Slurm, with faults planted on its nodes.

The link is made slow by the kernel (tc), file systems are real ones of 1 MB, and the other version
of a package is a folder that only one node has in its path.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster.slurm import excluded_hosts
from hpctrain.insight.doctor.command import main
from tests import cluster
from tests.conftest import run_json, run_module, runs

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
OTHER = """\
import os, sys

if os.uname().nodename == "node4":
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "other"))
"""


def mounted(node: str, place: str) -> Callable[[], None]:
    """Mount a file system of 1 MB for the jobs of a node; return what undoes it."""
    status = cluster.tool("status").stdout
    found = re.search(rf"^{node} +slurmd +(\d+)$", status, re.M)
    assert found, status
    enter = ["nsenter", f"--target={found[1]}", "--mount"]
    cluster.slurm(*enter, "mount", "-t", "tmpfs", "-o", "size=1m", "none", place)
    return lambda: subprocess.run([*enter, "umount", "--lazy", place], check=True)  # type: ignore[return-value]


def slow_link(node: str) -> Callable[[], None]:
    """Let the link of a node send 80 Mbit/s; return what undoes it."""
    folder = Path(os.environ["SLURM_CONF"]).parent
    tc = ["nsenter", f"--net={folder}/net/{node}", "tc", "qdisc"]
    where = ["dev", "eth0", "root"]
    cluster.slurm(
        *tc, "add", *where, *["tbf", "rate", "80mbit", "burst", "64kb", "latency", "400ms"]
    )
    return lambda: subprocess.run([*tc, "del", *where], check=True)  # type: ignore[return-value]


@pytest.fixture
def faults() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["--json", *arguments])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, answer


def failures(answer: dict[str, Any]) -> dict[str, set[str]]:
    return {
        host: {one["check"] for one in place["findings"] if one["verdict"] == "fail"}
        for host, place in answer["places"].items()
    }


@pytest.mark.slow
def test_planted_faults_are_found_on_their_nodes(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: ExitStack
) -> None:
    output = str(tmp_path / "runs")
    scratch = f"{Path(os.environ['SLURM_CONF']).parent}/scratch"
    path = tmp_path / "path"
    (path / "other" / "h5py-0.0.1.dist-info").mkdir(parents=True)
    (path / "other" / "h5py-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: h5py\nVersion: 0.0.1\n"
    )
    (path / "sitecustomize.py").write_text(OTHER)
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={output}"]
    where += ["data.stage=node", f"data.stage_dir={scratch}", "launch.snapshot=off"]

    code, well = doctor(capsys, "--nodes", "4", *where)
    print(json.dumps(well["figures"]))
    assert failures(well) == {f"node{n}": set() for n in (1, 2, 3, 4)}
    assert code == 0
    assert {"matmul_tflops", "all_reduce_latency_us"} <= {*well["figures"]["node1"]}

    faults.callback(mounted("node1", scratch))
    faults.callback(slow_link("node2"))
    faults.callback(mounted("node3", "/dev/shm"))
    code, ill = doctor(capsys, "--nodes", "4", *where, f"+site.env.PYTHONPATH={path}")
    print(json.dumps(ill["figures"]))
    assert code == 9
    found = failures(ill)
    assert found["node1"] == {"scratch: free space", "scratch: writing"}
    assert found["node2"] == {"link to other nodes"}
    assert found["node3"] == {"/dev/shm"}
    assert "same h5py" in found["node4"]
    assert set(excluded_hosts.read(output)) == {"node1", "node2", "node3", "node4"}

    faults.close()
    code, well = doctor(capsys, "--nodes", "4", *where)
    assert failures(well) == {f"node{n}": set() for n in (1, 2, 3, 4)}
    assert excluded_hosts.read(output) == {}


def test_a_job_leaves_a_bad_node(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: ExitStack
) -> None:
    """It goes on elsewhere by itself, new jobs avoid the node, and a passed check ends that."""
    output = str(tmp_path / "runs")
    where = ["experiment=digits", f"data.path={digits}", f"output_dir={output}", "tracking=off"]
    where += ["train.max_steps=3", "launch.snapshot=off"]
    faults.callback(mounted("node1", "/dev/shm"))
    run_module("hpctrain", "-m", *where)
    (run,) = runs(Path(output))
    job = cluster.job_id(run)

    def interrupted() -> bool:
        return bool(run_json(run)["attempts"]) and run_json(run)["state"] == "interrupted"

    cluster.wait_for(interrupted, 180, "the preflight")
    facts = cluster.wait_for(
        lambda: (
            shown
            if "ExcNodeList=node1" in (shown := cluster.slurm("scontrol", "show", "job", job))
            else ""
        ),
        60,
        "the exclusion",
    )
    assert "Restarts=1" in facts
    assert cluster.tool("hurry", job).returncode == 0
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    record = run_json(run)
    assert record["state"] == "finished"
    first, second = record["attempts"]
    assert "/dev/shm" in first["reason"]
    assert (first["hosts"], second["hosts"]) == (["node1"], ["node2"])
    log = (run / "logs" / f"{job}.rank0.log").read_text()
    seconds = re.search(r"launch\.preflight=quick: 1 node checked in ([\d.]+) s", log)
    assert seconds, log

    asked = run_module("hpctrain", "-m", *where, "seed=1", "launch.dry_run=true").stdout
    assert "--exclude=node1" in asked
    faults.close()
    code, _ = doctor(capsys, "--nodes", "1", f"output_dir={output}", "+site.sbatch.nodelist=node1")
    assert code == 0
    assert excluded_hosts.read(output) == {}
