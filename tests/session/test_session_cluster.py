"""A loop of one's own on a real Slurm cluster: the GAN of tests/session/programs."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hpctrain
from tests import cluster
from tests.conftest import Completed, journal_metrics, only_run, run_json, run_module, runs
from tests.made_runs import status_json
from tests.session.runs_of_own import PROGRAMS, check_metrics, check_same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("empty_queue")]
Gan = Callable[..., Completed]
PAIR = ("launch.tasks_per_node=2", "checkpoint.every_steps=10", "train.max_steps=60")


@pytest.fixture(scope="module")
def start(digits: Path) -> Gan:
    """A function that starts the GAN, with runs in a folder."""

    def call(to: Path, *overrides: str, conf: Path = PROGRAMS / "conf", **env: Any) -> Completed:
        where = (f"data.path={digits}", f"output_dir={to}")
        given = ("--config-dir", str(conf), "loop=gan", "name=gan", *where)
        return run_module("hpctrain", *given, "train.log_every=10", *overrides, **env)

    return call


@pytest.fixture
def gan(start: Gan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gan:
    """The same of its files in the folder `own`."""
    own = tmp_path / "own"
    shutil.copytree(PROGRAMS, own)
    subprocess.run(["git", "init", "-q", "."], cwd=own, check=True)  # the copy has what git sees
    monkeypatch.setenv("PYTHONPATH", str(own), prepend=":")

    def call(*overrides: str, to: str = "runs", **options: Any) -> Completed:
        given = ("-m", "tracking.upload=false", *overrides)
        return start(tmp_path / to, *given, conf=own / "conf", **options)

    return call


@pytest.fixture(scope="module")
def undisturbed(start: Gan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of PAIR that nothing disturbs, without a cluster."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "bin").mkdir()
    env = {"PATH": f"{folder}/bin", "PYTHONPATH": str(PROGRAMS)}
    start(folder / "runs", "-m", *PAIR, "tracking.upload=false", **env)
    run = only_run(folder)
    assert run_json(run)["attempts"][-1]["world_size"] == 2
    return run


def row(run: Path) -> dict[str, Any]:
    """Return what `status` says of a run."""
    (found,) = status_json(run.parent, run.name)
    assert isinstance(found, dict)
    return found


def wait_for_state(run: Path, *states: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        now = row(run)
        return now if now["state"] in states else None

    return cluster.wait_for(found, 240, f"{run.name} {states}")


def test_a_sweep_is_an_array_with_the_code_of_its_submission(gan: Gan, tmp_path: Path) -> None:
    sweep = ("loop.z=16,32", "train.max_steps=20", "metric=train/d_loss")
    module = tmp_path / "own" / "gan.py"
    for wrong, said in (
        ("loop=nothere", "loop=nothere: no such choice; there are: foreign, gan, "),
        ("loop._target_=my.missing.name", "loop._target_=my.missing.name: no package 'my' here"),
        ("loop._target_=gan.tran", "gan has no 'tran'"),
        ("+loop.zz=1", "loop.zz=1: gan.train has no argument zz"),
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
    assert sorted((each["state"], each["swept"]) for each in rows) == [
        ("finished", ["loop.z=16"]),
        ("finished", ["loop.z=32"]),
    ]
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    done = run_module("hpctrain", "report", str(folder), cwd=tmp_path)
    assert "The best of 2 runs is `gan-" in done.stdout
    assert " loop.z=" in done.stdout  # the command that makes the best again
    module.write_text(text)
    assert gan(*sweep).stderr.count("finished before") == 2


class Event(NamedTuple):
    """What disturbs a run of PAIR.

    Attributes:
        ends: The restart count and step of each attempt, with the cause and the answer to it.
        act: Called with the job when the run has made some steps; None if the files do it.
        files: Of tests/session/programs/disturbance.py.
        more: Overrides of the run.
    """

    ends: list[tuple[int, int, str | None, str | None]]
    act: Callable[[str], Any] | None = None
    files: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


EVENTS = {
    "a preemption, then a killed rank": Event(
        [(0, 0, "preempted", "requeue"), (1, 0, "rank killed", "restart"), (1, 1, None, None)],
        act=lambda job: cluster.tool("preempt", job).check_returncode(),
        files=(f"SIGKILL-{random.Random(7).randrange(35, 59)}-1",),
        more=("site.partition=preemptible",),
    ),
    "a rank that hangs": Event(
        [(0, 0, "hang", "restart"), (0, 1, None, None)],
        files=(f"SIGSTOP-{random.Random(8).randrange(5, 55)}-1",),
        more=("hang.floor_s=12",),
    ),
    "the time limit": Event(
        [(0, 0, "time limit", "requeue"), (1, 0, None, None)],
        act=lambda job: cluster.slurm(
            "scontrol", "update", f"JobId={job}", "EndTime=now+90seconds"
        ),
        more=("launch.warn_s=60",),
    ),
    "scontrol requeue": Event(  # nobody tells why the job gets SIGTERM
        [(0, 0, "", "requeue"), (1, 0, None, None)],
        act=lambda job: cluster.slurm("scontrol", "requeue", job),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_a_disturbed_run_ends_with_the_same_bits(
    name: str, gan: Gan, undisturbed: Path, store: Path
) -> None:
    event, folder = EVENTS[name], store.parent
    for file in event.files:
        (folder / file).touch()
    if event.act:
        (folder / "slow").write_text("0.1")
    gan(*PAIR, *event.more, "tracking.upload=true", "tracking.drain_s=60")
    (run,) = runs(folder)
    (job,) = cluster.job_ids(folder)
    if event.act:
        step = random.Random(name).randrange(5, 20)
        cluster.wait_for(lambda: (row(run)["step"] or 0) >= step, 180, f"step {step}")
        (folder / "slow").write_text("2")  # what follows may take seconds
        given = ("status", "--live", str(run), "--once", "--json")
        assert json.loads(run_module("hpctrain", *given).stdout)["state"] == "running"
        event.act(job)
        wait_for_state(run, "requeued")
        (folder / "slow").unlink()
        assert cluster.tool("hurry", job).returncode == 0
    assert cluster.wait_for_end([job]) == {job: "COMPLETED"}
    attempts = run_json(run)["attempts"]
    keys = ("restart_count", "step_id", "cause", "verdict")
    assert [tuple(map(each.get, keys)) for each in attempts] == event.ends
    assert (row(run)["state"], row(run)["restarts"]) == ("finished", len(attempts) - 1)
    if "hang" in name:
        said = rf"rank 1 \({attempts[0]['hosts'][0]}, pid \d+\) hangs after step \d+"
        assert re.match(said, attempts[0]["reason"])
    check_same_bits(run, undisturbed)
    check_metrics(run, store, undisturbed)
    report = run_module("hpctrain", "report", str(run)).stdout
    assert "The run is finished after 60 steps" in report
    for _, _, cause, _ in event.ends[:-1]:
        assert (cause or "SIGTERM") in report


@pytest.mark.slow
def test_programs_in_an_allocation_and_the_ends_of_runs_are_told(
    gan: Gan, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs are queued at once, so that they run side by side."""
    own, output = tmp_path / "own", tmp_path / "runs"
    words = ["train.max_steps=20", f"data.path={digits}", "tracking.upload=false"]
    program = [sys.executable, f"{own}/plain.py", *words, "name=program"]
    wrapped = " ".join(["srun", *program, f"output_dir={output}"])
    srun = cluster.sbatch(wrapped, "--ntasks=2", f"--output={tmp_path}/srun.log")
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(own)
    import plain

    called = [*words, "name=called", f"output_dir={output}"]
    function = hpctrain.submit_function(
        plain.learn, *called, tasks_per_node=2, overrides=[f"output_dir={output}"]
    )
    for file, text in (("nan/runs/NAN-5-0", ""), ("saves/runs/slow", "0.5")):
        (tmp_path / file).parent.mkdir(mode=0o700, parents=True)
        (tmp_path / file).write_text(text)
    gan(*PAIR, to="nan/runs")
    gan(*PAIR, "train.max_steps=9000", to="saves/runs")
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
    assert (tmp_path / "srun.log").read_text().count("after the session") == 2
    for run in runs(output):
        record = run_json(run)
        assert (record["state"], record["attempts"][-1]["world_size"]) == ("finished", 2)
    first, second = runs(output)
    assert journal_metrics(first) == journal_metrics(second)
