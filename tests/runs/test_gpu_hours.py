"""`launch.budget_gpu_hours`: what was taken, what is to come, and what may still begin."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.commands import status
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.frozen import load
from hpctrain.config.schema import Config
from hpctrain.config.validate import validate_job
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.estimates import planned_hours
from hpctrain.launch.entry import Entry, Status
from hpctrain.launch.sweeps.before_queueing import within_budget
from hpctrain.lock import file_lock
from hpctrain.runs import budget
from hpctrain.runs.budget import Budget, Piece, Share, may_begin
from hpctrain.runs.run_dir import RunDir
from hpctrain.slurm.allocations import Allocation
from tests.conftest import run_json
from tests.made_runs import make_checkpoint, make_run, make_sweep

NOW = time.time()


def entries(folder: Path, count: int, hours: float, **launch: object) -> list[Entry]:
    """Runs of 2 GPUs for at most half an hour: one GPU-hour each, as no run was measured."""
    some = []
    for seed in range(count):
        config = Config(seed=seed, output_dir=str(folder))
        config.data.path, config.train.max_steps = "/data", 100
        config.launch.gpus_per_node, config.launch.time_min = 2, 30
        config.launch.budget_gpu_hours = hours
        for name, value in launch.items():
            setattr(config.launch, name, value)
        some.append(Entry([f"seed={seed}"], config, RunDir.of(config, "digest")))
    return some


def share(hours: float = 1.0) -> Share:
    return Share(hours=hours, devices=2, per_node=2, per_rank=1.0, steps=100)


def booked_as(monkeypatch: pytest.MonkeyPatch, booked: dict[str, list[Allocation]] | None) -> None:
    """A stand-in for sacct; the real one answers in test_gpu_hours_cluster.py."""
    monkeypatch.setattr(budget, "allocations", lambda jobs: booked)


def test_what_fits_is_queued_in_its_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some, sweep = entries(tmp_path, 4, 2.5), make_sweep(tmp_path, "new", [])
    some[1].config.launch.time_min = 60  # it does not fit beside the first; those after it do
    some[0].run.freeze(some[0].config, state="created")
    make_checkpoint_of(some[0].run, 50)  # half of it is done
    fitting, others = within_budget(some, some, sweep)
    assert (fitting, others) == ([some[0], some[1]], [some[2], some[3]])
    assert others[0].state == "beyond the budget: needs 1 GPU-hours"
    assert "4 of 4 runs like no measured run, so with their time limit" in capsys.readouterr().err
    assert Budget.of(sweep) is not None
    for entry in some:
        entry.mark(Status.OPEN)
    few = entries(tmp_path, 4, 0.4)
    with pytest.raises(LaunchError, match=r"launch\.budget_gpu_hours=0\.4: nothing was queued"):
        within_budget(few, few, make_sweep(tmp_path, "none", []))
    assert Budget.of(tmp_path / "sweeps" / "none") is None


def make_checkpoint_of(run: RunDir, step: int) -> None:
    run.checkpoints.mkdir(exist_ok=True)
    make_checkpoint(run.path, step)


def test_slurm_books_each_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requeues, a job that never began, one that runs, and two runs that have shared a job."""
    attempt = {"launcher": "slurm", "started": NOW - 9e3, "ended": NOW - 8e3}
    first, second = (
        make_run(tmp_path, f"digits-0000000{i}", attempts=[attempt | {"job_id": "7_0"}])
        for i in (1, 2)
    )
    sweep = make_sweep(tmp_path, "a", [first, second])
    (sweep / "array-0").mkdir()
    (sweep / "array-0" / "job_id").write_text("8\n9\n")
    hour = NOW - 3600
    booked_as(
        monkeypatch,
        {
            "7_0": [
                Allocation(0, hour - 3600, hour, "REQUEUED", 1, 2),
                Allocation(hour, hour + 1800, NOW, "COMPLETED", 1, 2),
            ],
            "8_0": [Allocation(hour, hour, hour + 1800, "FAILED", 2)],  # its GPUs are not counted
            "9_1": [Allocation(hour, None, None, "PENDING", 1, 2)],
        },
    )
    whole = Budget(hours=9.0, shares={str(run): share() for run in (first, second)})
    found = whole.standing(sweep)
    assert found.spent == pytest.approx(2 + 1 + 2 * 2 * 0.5)
    assert (found.coming, found.left) == (0, pytest.approx(4))
    assert str(found) == "budget of 9 GPU-hours: 5 spent (booked by Slurm), 4 left"


def test_without_accounting_the_runs_have_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = {"started": NOW - 3600, "ended": NOW - 1800, "world_size": 2}
    script = {"script": str(tmp_path / "sweeps" / "b" / "array-0" / "job.sh")}
    runs = [
        make_run(tmp_path, f"digits-0000000{i}", attempts=[attempt], submission=script)
        for i in (1, 2)
    ]
    sweep = make_sweep(tmp_path, "b", runs)
    booked_as(monkeypatch, None)
    Budget(hours=1.5, gpus=False, shares={str(run): share() for run in runs}).write(sweep)
    status.main(["--dir", str(tmp_path), "b"])
    assert (
        "budget of 1.5 rank-hours (no GPUs): 2 spent (counted by the runs, without Slurm's "
        "accounting), 0.5 too many" in " ".join(capsys.readouterr().out.split())
    )


def test_a_worker_begins_nothing_that_cannot_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, sweep = entries(tmp_path, 3, 1.2), make_sweep(tmp_path, "s", [])
    booked: dict[str, list[Allocation]] = {}
    booked_as(monkeypatch, booked)
    assert may_begin(sweep, some[0].run.path, 50, "3_0") == "yes"  # without a budget
    budget.of_search(sweep, some[0].config)
    for entry in some:
        entry.run.freeze(entry.config, state="created")
    first, second, third = (entry.run.path for entry in some)
    assert may_begin(sweep, first, 50, "3_0") == "yes"  # half of a GPU-hour
    assert may_begin(sweep, second, 50, "3_1") == "yes"
    assert may_begin(sweep, third, 50, "3_2") == "later"  # 0.2 is left, until they are done
    make_checkpoint_of(some[1].run, 50)
    run_state = run_json(second)
    assert run_state["state"] == "created"
    # The second worker has taken a quarter of what was foreseen, and now wants another rung.
    (second / "run.json").write_text(
        json.dumps(run_state | {"attempts": [{"launcher": "slurm", "job_id": "3_1"}]})
    )
    booked["3_1"] = [Allocation(NOW, NOW - 225, NOW, "COMPLETED", 1, 2)]
    assert may_begin(sweep, second, 60, "3_1") == "yes"
    assert may_begin(sweep, third, 60, "3_2") == "later"
    booked["3_1"] = [Allocation(NOW, NOW - 2100, NOW, "COMPLETED", 1, 2)]
    Budget(hours=1.2, search=True, shares={str(second): share()}).write(
        sweep
    )  # the others are done
    assert may_begin(sweep, third, 50, "3_2") == "never"
    # Many workers ask, and accounting is slow: this one asks again.
    monkeypatch.setattr(budget, "_LOCK_S", 0.0)
    with file_lock(sweep / ".budget.json.lock", lambda: None):
        assert may_begin(sweep, third, 50, "3_2") == "later"


def test_a_piece_beyond_its_forecast_counts_until_its_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    booked_as(monkeypatch, {})
    monkeypatch.setattr(budget, "time", SimpleNamespace(time=lambda: NOW))
    begun = NOW - 1000
    attempts = [{"started": begun, "launcher": "slurm", "job_id": "3_1"}]
    run = make_run(tmp_path, "digits-00000001", state="running", attempts=attempts)
    piece = Piece(devices=2, end=NOW - 60, run=str(run), until=50)
    whole = Budget(hours=9.0, search=True, shares={str(run): share()}, pieces={"1": piece})
    sweep = make_sweep(tmp_path, "s", [run])
    assert whole.standing(sweep).coming == 0  # nobody trains it any more
    with RunDir(run).lock():
        assert whole.standing(sweep).coming == pytest.approx(0.5)  # half of the steps, as foreseen
        told = {"step": 30, "max_steps": 100, "steps_per_s": 0.01, "step_s": 100}
        told |= {"time": NOW, "stepped": NOW}
        (run / "progress.json").write_text(json.dumps(told))
        assert whole.standing(sweep).coming == pytest.approx(2 * 2000 / 3600)
    late = Budget(hours=9.0, search=True, pieces={"1": Piece(devices=2, end=NOW + 1800)})
    assert late.standing(sweep).coming == pytest.approx(1)


def test_runs_of_other_lengths_are_planned_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def foreseen(command: list[str], **_: object) -> SimpleNamespace:  # a stand-in for `plan`
        configs = [load(Path(file)) for file in command[4:]]
        hours = [each.data.repeat / each.parallel.tp for each in configs]
        return SimpleNamespace(returncode=0, stdout=json.dumps(hours))

    monkeypatch.setattr(planned_hours.subprocess, "run", foreseen)
    some = [entry.config for entry in entries(tmp_path, 4, 2.5)]
    some[1].data.repeat, some[2].parallel.tp = 5, 2
    for config in some:
        config.hardware = {"name": "h100_sxm"}
    assert planned_hours.planned_hours(some) == [1, 5, 0.5, 1]


@pytest.mark.slow
def test_runs_like_no_measured_one_count_as_planned(
    digits: Path, tmp_path: Path, composer: Composer, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("train.max_steps=100000", "launch.gpus_per_node=1", "launch.time_min=600")
    where = (f"data.path={digits}", f"output_dir={tmp_path}", "launch.budget_gpu_hours=10")
    known = [
        composer.typed(["experiment=digits", *where, *keys, f"seed={seed}", "hardware=h100_sxm"])
        for seed in (0, 1)
    ]
    kinds = "launch.gpu_type=[a100_40,h100]"
    kinds = "launch.gpu_type=[a100_40,h100]"
    slow = composer.typed(["experiment=digits", *where, *keys, kinds, "seed=2"])
    free = composer.typed(["experiment=digits", *where, *keys, "seed=3"])
    some = [Entry([], each, RunDir.of(each, "digest")) for each in (*known, slow, free)]
    sweep = make_sweep(tmp_path, "new", [])
    fitting, others = within_budget(some, some, sweep)
    assert (fitting, others) == (some[:3], some[3:])
    said = capsys.readouterr().err
    assert "1 of 4 runs like no measured run, so with their time limit" in " ".join(said.split())
    assert "3 of 4 runs like no measured run, so as `plan` foresees" in " ".join(said.split())
    written = Budget.of(sweep)
    assert written is not None
    hours = [written.shares[str(entry.run.path)].hours for entry in some]
    assert 0 < hours[0] == hours[1] < hours[2] < 5 < hours[3] == 10
    searching = make_sweep(tmp_path, "search", [])
    budget.of_search(searching, known[0])
    search = Budget.of(searching)
    assert search is not None
    assert search.planned_h == pytest.approx(hours[0] / 1.3)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_a_wrong_budget_is_refused(value: str, composer: Composer) -> None:
    with pytest.raises(ConfigError, match=r"launch\.budget_gpu_hours="):
        validate_job(
            composer.typed(["experiment=digits", f"launch.budget_gpu_hours={value}"]), ["launch"]
        )
