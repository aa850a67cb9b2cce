"""`bench` over the nodes of a real Slurm."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import cluster
from tests.doctor.test_nodes_cluster import slow_link

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]


@pytest.fixture
def faults() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bench(digits: Path, folder: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run `bench` in a job of two nodes, and return what rank 0 prints."""
    words = [sys.executable, "-m", "hpctrain", "bench", "experiment=digits", f"data.path={digits}"]
    words += [f"output_dir={folder}/runs", "data.prefetch_mb=1", "--steps=10", "--json", *options]
    output = folder / "bench.log"
    script = f"srun --output={folder}/rank%t.log --nodes=2 {' '.join(words)}; echo $?"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    job = cluster.sbatch(script, "--nodes=2", f"--output={output}", env=env)
    cluster.wait_for_end([job])
    logs = "".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    assert output.read_text().split()[-1] == str(code), output.read_text() + logs
    line = next(line for line in logs.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def test_two_nodes_and_a_link_that_became_slow(
    digits: Path, tmp_path: Path, faults: ExitStack
) -> None:
    before = tmp_path / "before.json"
    found = bench(digits, tmp_path, f"--save={before}")
    print(json.dumps(found))
    assert list(found["parts"]) == ["data", "compute", "communication", "whole"]
    assert (found["setup"]["ranks"], found["setup"]["nodes"]) == (2, 2)
    assert all(each["samples_per_s"] > 0 for each in found["parts"].values())
    assert list((tmp_path / "runs").iterdir()) == []

    faults.callback(slow_link("node2"))
    options = ("--comm-only", f"--against={before}", "--tolerance=50")
    slow = bench(digits, tmp_path, *options, code=9)
    print(json.dumps(slow))
    (line,) = slow["slower"]
    assert line.startswith("communication: ")
