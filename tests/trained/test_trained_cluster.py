"""On a real Slurm cluster: evaluate, predict and start from a run, with the ranks of a job."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain import load_run
from tests import cluster
from tests.bounds import EXACT
from tests.conftest import Completed, only_run, run_json, runs
from tests.trained.test_evaluate import QUICK, check_predictions, logits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("empty_queue")]
Train = Callable[..., Completed]
PYTHON = (sys.executable, "-m", "hpctrain")


def test_the_ranks_of_a_job_use_a_trained_run(train: Train, digits: Path, tmp_path: Path) -> None:
    train(*QUICK)
    run = only_run(tmp_path)
    trained = load_run(run).result
    srun = ("srun", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")
    # The layout of the run (DDP) fits four ranks; ZeRO-3 over them is asked for.
    said = cluster.slurm(*srun, *PYTHON, "evaluate", str(run), "--json", timeout=300)
    (line,) = [text for text in said.splitlines() if text.startswith('{"run"')]
    for name, value in json.loads(line)["metrics"].items():
        assert value == pytest.approx(trained[f"val/{name}"], rel=EXACT)
    out = tmp_path / "out"
    zero3 = ("parallel.dp_replicate=1", "parallel.dp_shard=-1")
    words = ("predict", str(run), str(digits), str(out), "--shard-samples", "100", *zero3)
    cluster.slurm(*srun, *PYTHON, *words, timeout=300)
    check_predictions(out, logits(run, digits))
    # A job of two nodes begins with the weights of the run, which one process has trained.
    start = (f"checkpoint.init_from={run}", "train.max_steps=1", "optimizer.lr=1e-12")
    train("-m", *QUICK, *start, "launch.nodes=2", "parallel=zero3")
    (job,) = [cluster.job_id(each) for each in runs(tmp_path / "runs") if each != run]
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    (other,) = set(runs(tmp_path / "runs")) - {run}
    assert run_json(other)["attempts"][-1]["world_size"] == 2
    found = run_json(other)["result"]
    assert found["val/loss"] == pytest.approx(trained["val/loss"], rel=EXACT)
