"""Tests of the command of a search, on this machine."""

import re
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from hpctrain.base.files import lock
from hpctrain.search.study_file import study_storage
from hpctrain.search.trials import FoundSearch
from tests.conftest import Completed, run_json, runs
from tests.search.conftest import Begin

Train = Callable[..., Completed]
SMALL = ("train.max_steps=2", "launch.snapshot=off", "tracking=off")
SEARCH = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", *SMALL)
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
    found = FoundSearch.of(sweep)
    assert (found.rungs, found.n_trials, found.direction) == ((1, 3, 9), 99, "maximize")


def test_a_study_that_no_search_has_begun_is_refused(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "runs" / "sweeps" / "mine.optuna"
    study = optuna.create_study(study_name="mine", storage=study_storage(file))
    study.tell(study.ask(), 0.5)
    said = refused(begin, capsys, *GIVEN, "seed=range(0,9)")
    assert f"study_name=mine: {file} has a study of this name with trials" in said


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
    table = f"9 1 0:9 / {tmp_path} rw - nfs server:/x rw,local_lock=all\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: table)  # for /proc/self/mountinfo
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
    (file,) = tmp_path.glob("runs/sweeps/*/search.json")
    best = FoundSearch.of(file.parent).best
    finished = [r["result"]["val/accuracy"] for r in records if r["state"] == "finished"]
    assert best is not None
    assert best.value == max(finished)
    # The same command has nothing left to do, and a larger one makes only the missing trials.
    again = train(*search, "hydra.sweeper.n_trials=6", **no_sbatch)
    assert "continues: 6 trials done, 0 under way" in again.stdout
    assert len(runs(tmp_path / "runs")) == len(states)
    more = train(*search, "hydra.sweeper.n_trials=8", **no_sbatch)
    assert " of 8 trials of study digits-" in more.stdout
    (stored,) = tmp_path.glob("runs/sweeps/*.optuna")
    assert stored.name in re.sub(r"study (\S+)", r"\1.optuna", more.stdout)
