"""Tests of the command of a search, on this machine."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import yaml

from hpctrain import lock
from hpctrain.errors import StorageError
from hpctrain.search.study_file import study_storage
from hpctrain.search.trials import Found
from hpctrain.search.worker_arrays import WorkerFile, new_worker
from tests import cluster, forkserver
from tests.conftest import Completed, run_json, runs
from tests.postgres import Postgres
from tests.search.conftest import HELD, Begin

Train = Callable[..., Completed]
SMALL = ("train.max_steps=2", "launch.snapshot=off", "tracking=off")
SEARCH = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", *SMALL)
KILLED = (
    *("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=3"),
    *("optimizer.lr=tag(log,interval(1e-4,1e-1))", "hydra.sweeper.n_trials=4"),
    *("train.max_steps=36", "hydra.sweeper.rungs=[6,12]", "hydra.sweeper.eta=2"),
)
GIVEN = ("train.max_steps=9", "hydra.sweeper.rungs=[1,3]", "hydra.sweeper.study_name=mine")


def refused(
    begin: Begin, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2
) -> str:
    """Return what a search that is refused says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        begin(*arguments)
    assert end.value.code == code
    return capsys.readouterr().err


def test_a_study_does_not_change_what_it_searches(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = begin(*GIVEN, "seed=range(0,9)")
    assert begin(*GIVEN, "seed=range(0,9)", "hydra.sweeper.n_trials=99") == sweep
    changed = ("hydra.sweeper.rungs=[1,4]", "hydra.sweeper.direction=minimize", "metric=val/loss")
    said = refused(begin, capsys, *GIVEN, "seed=range(0,8)", *changed)
    assert (
        "this study has direction=maximize (now direction=minimize); metric=val/accuracy (now "
        "metric=val/loss); rungs=[1, 3, 9] (now rungs=[1, 4, 9]); seed=range(0,9) (now "
        "seed=range(0,8)): trials of both could not be compared"
    ) in said
    other = "hydra.sweeper.study_name=other"
    said = refused(begin, capsys, *GIVEN, "seed=range(0,9)", other, f"hydra.sweep.dir={sweep}")
    assert "this folder has the search mine already" in said
    found = Found.of(sweep)
    assert (found.rungs, found.n_trials, found.direction) == ((1, 3, 9), 99, "maximize")


def test_a_study_that_no_search_has_begun_is_refused(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "runs" / "sweeps" / "mine.optuna"
    study = optuna.create_study(study_name="mine", storage=study_storage(file))
    study.tell(study.ask(), 0.5)
    said = refused(begin, capsys, *GIVEN, "seed=range(0,9)")
    assert f"study_name=mine: {file} has a study of this name with trials" in said


def test_a_password_in_the_storage_is_not_written(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = (*GIVEN, "seed=range(0,9)")
    storage = "hydra.sweeper.storage=postgresql://ann:mellon77@host/db"
    said = refused(begin, capsys, *given, storage)
    assert "hydra.sweeper.storage=postgresql://ann:***@host/db holds a password" in said
    assert "export it as NAME_PASSWORD and say ${oc.env:NAME_PASSWORD} in its place" in said
    assert "mellon77" not in said
    away = "hydra.sweeper.storage=sqlite:////proc/none/x.db"  # as a server that does not answer
    said = refused(begin, capsys, *given, away, code=StorageError.exit_code)
    assert f"{away}: " in said
    assert "unable to open database file" in said
    assert not (tmp_path / "runs").exists()


def test_a_rung_that_no_epoch_reaches_is_refused(
    begin: Begin, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("train.max_epochs=2", "train.max_steps=900", "hydra.sweeper.rungs=[20,44]")
    said = refused(begin, capsys, *given, "seed=range(0,9)")
    assert "rungs=[20, 44, 900]: with train.max_epochs=2 a run ends at step 44" in said
    begin(*given, "seed=range(0,9)", "hydra.sweeper.rungs=[20,43]")
    # Trials with smaller batches reach it.
    begin(*given, "train.global_batch_size=choice(64,16)")


def test_a_file_system_without_locks_is_refused(
    begin: Begin,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def none(*_: object) -> None:  # a stand-in for Lustre without `flock`
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    said = refused(begin, capsys, *GIVEN, "seed=range(0,9)")
    assert "a search needs locks that all nodes see" in said
    assert "Function not implemented; a Lustre client needs the option `flock`" in said
    assert not (tmp_path / "runs").exists()


def test_locks_of_one_host_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"server:/x {tmp_path} nfs rw,local_lock=all,vers=3 0 0\n/dev/x / ext4 rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda *_: mounts)  # a stand-in for /proc/self/mounts
    assert lock.why_no_locks(tmp_path) == f"{tmp_path} (nfs) is mounted with local_lock=all"
    assert lock.why_no_locks(tmp_path, alone=True) == ""


@pytest.mark.slow
def test_a_search_here_goes_on_where_it_stopped(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    # `in_features=3` fails in the training; with 7 micro-batches the trial has no valid config.
    search = (
        *SEARCH,
        "optimizer.lr=tag(log,interval(1e-4,1e-1))",
        "model.in_features=choice(64,3)",
        "train.accumulate=choice(1,7)",
        "hydra/sweeper/sampler=random",
        "hydra.sweeper.sampler.seed=0",
    )
    done = train(*search, "hydra.sweeper.n_trials=6", **no_sbatch)
    assert "train.global_batch_size=64 is not divisible by" in done.stderr
    records = [run_json(run) for run in runs(tmp_path / "runs")]
    states = [record["state"] for record in records]
    assert set(states) == {"failed", "finished"}
    count = states.count("finished")
    assert f"{count} of 6 trials of study digits-" in done.stdout
    (file,) = tmp_path.glob("runs/sweeps/*/optimization_results.yaml")
    found = yaml.safe_load(file.read_text())
    finished = [r["result"]["val/accuracy"] for r in records if r["state"] == "finished"]
    assert (found["name"], found["best_value"]) == ("optuna", max(finished))
    # The same command has nothing left to do, and a larger one makes only the missing trials.
    again = train(*search, "hydra.sweeper.n_trials=6", **no_sbatch)
    assert "continues: 6 trials done, 0 under way" in again.stdout
    assert len(runs(tmp_path / "runs")) == len(states)
    more = train(*search, "hydra.sweeper.n_trials=8", **no_sbatch)
    assert " of 8 trials of study digits-" in more.stdout
    (stored,) = tmp_path.glob("runs/sweeps/*.optuna")
    assert stored.name in re.sub(r"study (\S+)", r"\1.optuna", more.stdout)


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_is_an_error(
    train: Train, no_sbatch: dict[str, str]
) -> None:
    search = (*SEARCH, "seed=range(0,9)", "model.in_features=3", "hydra.sweeper.n_trials=4")
    done = train(*search, code=4, **no_sbatch)
    assert "none of the 4 trials finished" in done.stderr
    strict = ("seed=range(0,8)", "hydra.sweeper.max_failure_rate=0.5")
    done = train(*search, *strict, code=4, **no_sbatch)
    assert "2 of 2 trials failed, more than hydra.sweeper.max_failure_rate=0.5" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_metric_that_is_not_there_is_a_failure(train: Train, no_sbatch: dict[str, str]) -> None:
    # This search is also tracked.
    search = (*SEARCH[:-1], "seed=range(0,9)", "metric=train/bubble", "hydra.sweeper.n_trials=1")
    assert "train/bubble" in train(*search, code=4, **no_sbatch).stderr


def start_worker(sweep: Path) -> "forkserver.Popen":
    folder = new_worker(sweep, WorkerFile())
    return forkserver.Popen([sys.executable, "-m", "hpctrain", "work", str(folder)])


@pytest.mark.slow
def test_kills_in_the_training_change_no_value(begin: Begin, tmp_path: Path) -> None:
    """Real trainings of digits: `kill -9` reaches a worker in its first, third and fifth piece."""
    found = []
    for disturbed in (True, False):
        sweep = begin(*KILLED, f"output_dir={tmp_path}/{disturbed}")
        folder_of_runs = sweep.parents[1]
        for pieces in (0, 2, 4) if disturbed else ():
            process = start_worker(sweep)

            def trains(least: int = pieces, folder: Path = folder_of_runs) -> bool:
                records = [run_json(run) for run in runs(folder)]
                begun = sum(len(record["attempts"]) for record in records)
                return begun > least and "running" in [record["state"] for record in records]

            cluster.wait_for(trains, 400, "a training")
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert start_worker(sweep).wait(900) == 0
        search_now = Found.of(sweep)
        assert search_now.ended
        found.append(search_now)
    killed, alone = found
    assert [t.values for t in killed.trials] == [t.values for t in alone.trials]
    assert [t.state for t in killed.trials] == [t.state for t in alone.trials]
    assert killed.best is not None
    assert killed.best.params == alone.best.params  # type: ignore[union-attr]


@pytest.mark.slow
def test_two_workers_on_postgresql_of_which_one_is_killed(
    postgres: Postgres, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    (hold := tmp_path / "hold").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    search = (*KILLED, "task._target_=held.Task", f"hydra.sweeper.storage={postgres.uri}")
    sweep = begin(*search)
    killed, other = start_worker(sweep), start_worker(sweep)

    def both_train() -> bool:
        states = [run_json(run)["state"] for run in runs(tmp_path / "runs")]
        return states == ["running", "running"]

    cluster.wait_for(both_train, 400, "two trainings")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # The server, or a firewall, ends the connections that others have.
    others = "pid <> pg_backend_pid() AND datname IS NOT NULL"
    ended = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {others}"
    assert int(postgres.ask(ended)) > 0
    hold.unlink()
    assert other.wait(900) == 0
    found = Found.of(sweep)
    assert found.ended
    assert {trial.state for trial in found.trials} == {"finished", "pruned"}
    assert postgres.ask("SELECT count(*) FROM trials") == "4"
    assert not [*tmp_path.glob("runs/sweeps/*.optuna")]
    # The same command finds the study there, and goes on with it.
    assert begin(*search, "hydra.sweeper.n_trials=5") == sweep
    assert start_worker(sweep).wait(900) == 0
    assert postgres.ask("SELECT count(*) FROM trials") == "5"
