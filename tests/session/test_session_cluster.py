"""A loop of one's own on a real Slurm cluster: a GAN with two optimizers."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpctrain
from tests import cluster
from tests.conftest import Completed, journal, journal_metrics, only_run, run_json, run_module, runs
from tests.made_runs import status_json
from tests.session.runs_of_own import tensors

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
LOOPS = Path(__file__).parent / "cluster_loops"
Gan = Callable[..., Completed]
PAIR = ("launch.tasks_per_node=2", "checkpoint.every_steps=10", "train.max_steps=60")


@pytest.fixture
def gan(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gan:
    """A function that starts the GAN, whose files are in the folder `own`, from there."""
    own = tmp_path / "own"
    shutil.copytree(LOOPS, own)
    subprocess.run(["git", "init", "-q", "."], cwd=own, check=True)  # the copy has what git sees
    monkeypatch.setenv("PYTHONPATH", str(own), prepend=":")

    def call(*overrides: str, to: str = "runs", **options: Any) -> Completed:
        where = (f"data.path={digits}", f"output_dir={tmp_path}/{to}", "tracking.upload=false")
        given = ("--config-dir", f"{own}/conf", "loop=cluster_gan", "name=gan", *where)
        return run_module("hpctrain", *given, "train.log_every=10", *overrides, **options)

    return call


def row(run: Path) -> dict[str, Any]:
    """Return what `status` says of a run."""
    (found,) = status_json(run.parent, run.name)
    assert isinstance(found, dict)
    return found


def wait_for_state(run: Path, *states: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        now = row(run)
        return now if now["state"] in states else None

    return cluster.wait_for(found, 180, f"{run.name} {states}")


def check_as_undisturbed(gan: Gan, run: Path, no_sbatch: dict[str, str]) -> None:
    """Check that a run of PAIR has the bits and the metrics of one that nothing has disturbed."""
    gan("-m", *PAIR, to="undisturbed", **no_sbatch)
    (other,) = runs(run.parents[1] / "undisturbed")
    assert run_json(other)["attempts"][-1]["world_size"] == 2
    ours, theirs = tensors(run), tensors(other)
    assert ours.keys() == theirs.keys()
    assert {"model.g.0.weight", "optimizer.od.state.d.0.weight.exp_avg"} <= ours.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert journal_metrics(run) == journal_metrics(other)
    told = [each["step"] for each in journal(run) if "train/d_loss" in each.get("metrics", {})]
    assert told == [10, 20, 30, 40, 50, 60]


def test_a_sweep_is_an_array_with_the_code_of_its_submission(gan: Gan, tmp_path: Path) -> None:
    sweep = ("-m", "loop.z=16,32", "train.max_steps=20", "metric=train/d_loss")
    module = tmp_path / "own" / "cluster_gan.py"
    for wrong, said in (
        ("loop=nothere", "loop=nothere: no such choice; there are: cluster_gan, supervised"),
        ("loop._target_=my.missing.name", "loop._target_=my.missing.name: no package 'my' here"),
        ("loop._target_=cluster_gan.tran", "cluster_gan has no 'tran'"),
        ("+loop.zz=1", "loop.zz=1: cluster_gan.train has no argument zz"),
    ):
        assert said in gan(*sweep, wrong, code=2).stderr
    assert not (tmp_path / "runs").exists()
    gan(*sweep)
    text = module.read_text()
    module.write_text("raise SystemExit('edited')")
    jobs = cluster.job_ids(tmp_path / "runs")
    assert sorted(job.rpartition("_")[2] for job in jobs) == ["0", "1"]
    assert len({job.partition("_")[0] for job in jobs}) == 1
    assert set(cluster.wait_for_end(jobs).values()) == {"COMPLETED"}
    rows = status_json(tmp_path / "runs")
    assert [(each["state"], each["swept"]) for each in rows] == [
        ("finished", ["loop.z=16"]),
        ("finished", ["loop.z=32"]),
    ]
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    done = run_module("hpctrain", "report", str(folder), cwd=tmp_path)
    assert "The best of 2 runs is `gan-" in done.stdout
    assert " loop.z=" in done.stdout  # the command that makes the best again
    module.write_text(text)
    assert gan(*sweep).stderr.count("finished before") == 2


@pytest.mark.slow
def test_a_preemption_and_a_killed_rank_leave_the_same_bits(
    gan: Gan, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    """The rank is killed in the job that the preemption has put back into the queue."""
    preempted, killed = random.randrange(5, 25), random.randrange(35, 59)
    (tmp_path / "slow").touch()
    gan("-m", *PAIR, "site.partition=preemptible")
    run = only_run(tmp_path)
    (job,) = cluster.job_ids(tmp_path / "runs")
    cluster.wait_for(lambda: (row(run)["step"] or 0) >= preempted, 90, f"step {preempted}")
    (tmp_path / f"SIGKILL-{killed}-1").touch()
    assert cluster.tool("preempt", job).returncode == 0
    wait_for_state(run, "requeued")
    (tmp_path / "slow").unlink()
    assert cluster.tool("hurry", job).returncode == 0
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    attempts = run_json(run)["attempts"]
    assert [(each["restart_count"], each["step_id"]) for each in attempts] == [
        (0, 0),
        (1, 0),
        (1, 1),
    ]
    assert [each.get("cause") for each in attempts] == ["preempted", "rank killed", None]
    assert [each.get("verdict") for each in attempts] == ["requeue", "restart", None]
    assert attempts[2]["first_step"] == max(killed // 10 * 10, attempts[1]["first_step"])
    assert (row(run)["state"], row(run)["restarts"]) == ("finished", 2)
    check_as_undisturbed(gan, run, no_sbatch)


@pytest.mark.slow
def test_programs_in_an_allocation_and_the_ends_of_runs_are_told(
    gan: Gan, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs are queued at once, so that they run side by side."""
    own, output = tmp_path / "own", tmp_path / "runs"
    words = ["train.max_steps=20", f"data.path={digits}", "tracking.upload=false"]
    program = [sys.executable, f"{own}/cluster_gan.py", *words, "name=program"]
    wrapped = " ".join(["srun", *program, f"output_dir={output}"])
    srun = cluster.sbatch(wrapped, "--ntasks=2", f"--output={tmp_path}/srun.log")
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    import cluster_gan  # type: ignore[import-not-found]

    called = [*words, "name=called", f"output_dir={output}"]
    function = hpctrain.submit_function(
        cluster_gan.main, *called, tasks_per_node=2, overrides=[f"output_dir={output}"]
    )
    (tmp_path / "nan").mkdir()
    (tmp_path / "nan" / "NAN-5-0").touch()
    gan("-m", *PAIR, to="nan/runs")
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "slow").touch()
    gan("-m", *PAIR, "train.max_steps=9000", to="saves/runs")
    broken, saves = only_run(tmp_path / "nan"), only_run(tmp_path / "saves")

    cluster.wait_for(lambda: (row(saves)["step"] or 0) >= 5, 90, "its steps")
    done = run_module("hpctrain", "cancel", "--save", str(saves))
    assert "asked to save and stop" in done.stdout
    stopped = wait_for_state(saves, "interrupted")
    assert "cancelled by" in stopped["reason"]
    step = run_json(saves)["attempts"][0]["step"]
    assert list(saves.glob(f"checkpoints/step-{step:08d}"))
    run_module("hpctrain", "resume", str(saves))
    cluster.wait_for(lambda: len(run_json(saves)["attempts"]) == 2, 90, "the second attempt")
    assert run_json(saves)["attempts"][1]["first_step"] == step

    told = wait_for_state(broken, "failed")
    why = "train/d_loss, train/g_loss is not finite since step 6 (first on rank 0, "
    assert why in told["reason"]
    logs = run_module("hpctrain", "logs", str(broken)).stdout
    assert "train/d_loss" in logs
    assert len(set(function.results())) == 1
    assert cluster.wait_for_end([srun]) == {srun: "COMPLETED"}
    assert (tmp_path / "srun.log").read_text().count("ended with") == 2
    for run in runs(output):
        record = run_json(run)
        assert (record["state"], record["attempts"][-1]["world_size"]) == ("finished", 2)
    first, second = runs(output)
    assert journal_metrics(first) == journal_metrics(second)
