"""Tests of workers without training: a stand-in writes what a training leaves in run.json."""

import os
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import optuna
import pytest
from msgspec.structs import replace
from optuna.distributions import IntDistribution, distribution_to_json

from hpctrain.base.files.lock import file_lock
from hpctrain.errors import ConfigError
from hpctrain.runs.run_dir import RunDir
from hpctrain.search import space, trial_run
from hpctrain.search.trial_run import TrialPiece
from hpctrain.search.trials import FoundSearch, _trial
from hpctrain.search.worker_arrays import WorkerFile, new_worker
from hpctrain.search.workers import Worker
from tests.search.conftest import Begin, worker

METRIC = "val/accuracy"
RUNGS = ("train.max_steps=9", "hydra.sweeper.rungs=[1,3]", "optimizer.lr=range(1,28)")


def stand_in(piece: TrialPiece, value: float) -> None:
    """Leave in the run directory what a training up to `piece.until` leaves."""
    run = RunDir(piece.run)
    with run.lock():
        run.begin_attempt()
        step = piece.until or 9
        state = "paused" if piece.until else "finished"
        run.end_attempt(state, result={"step": step, METRIC: value})


def value_of(piece: TrialPiece) -> float:
    """Return the best value for 14."""
    lr = float((piece.run / "config.yaml").read_text().partition("\n  lr: ")[2].split()[0])
    return -abs(lr - 14)


def train_all(*workers: Worker) -> None:
    """Let the workers train one piece after another in turn, until none gets one."""
    left = [*workers]
    while left:
        for each in [*left]:
            if (piece := each.next()) is None:
                left.remove(each)
            else:
                stand_in(piece, value_of(piece))
                each.settle(piece)


def test_the_best_of_each_rung_is_promoted(begin: Begin) -> None:
    sweep = begin(*RUNGS, "hydra.sweeper.n_trials=9")
    train_all(worker(sweep), worker(sweep))
    found = FoundSearch.of(sweep)
    assert found.ended
    assert found.best is not None
    ranked = sorted(found.trials, key=lambda trial: found.rank(trial, 1))
    assert found.best == ranked[0]
    assert {trial.state for trial in found.trials} == {"finished", "pruned"}
    assert all(trial.reason for trial in found.at("pruned"))
    assert len({trial.run for trial in found.trials}) == 9
    assert sum(trial.step for trial in found.trials) < 9 * 9
    # A larger search goes on, and its workers know at once.
    again = begin(*RUNGS, "hydra.sweeper.n_trials=10")
    assert again == sweep
    train_all(worker(sweep))
    found = FoundSearch.of(sweep)
    assert len(found.trials) == 10


def test_a_run_that_ends_before_the_rung_has_finished(begin: Begin) -> None:
    """`train.max_epochs` may end a run at step 2, between the rungs at 1 and 3."""
    sweep = begin(*RUNGS, "hydra.sweeper.n_trials=1")
    mine = worker(sweep)
    first = mine.next()
    assert first is not None
    stand_in(first, 0.5)
    mine.settle(first)
    second = mine.next()
    assert second is not None
    assert (second.until, second.run) == (3, first.run)
    with RunDir(second.run).lock():
        RunDir(second.run).begin_attempt()
        RunDir(second.run).end_attempt("finished", result={"step": 2, METRIC: 0.75})
    mine.settle(second)
    assert mine.next() is None
    (trial,) = FoundSearch.of(sweep).trials
    assert (trial.state, trial.rung, trial.values) == ("finished", 3, {1: 0.5, 9: 0.75})


@pytest.mark.parametrize(
    "grid",
    [
        {"_target_": "optuna.samplers.BruteForceSampler"},
        {"_target_": "optuna.samplers.GridSampler", "search_space": {"seed": [0, 1, 2]}},
    ],
)
def test_a_grid_is_asked_for_each_value_once(grid: dict[str, Any], tmp_path: Path) -> None:
    study = optuna.create_study()
    space_of = {"seed": distribution_to_json(IntDistribution(0, 2))}
    asked = FoundSearch(
        study="digits",
        storage="",
        direction="minimize",
        metric="val/loss",
        n_trials=3,
        sampler=grid,
        space=space_of,
    )
    for number in range(3):
        assert space.ask(study, asked) == number
        if number == 1:  # also after a trial that has failed
            study.tell(number, state=optuna.trial.TrialState.FAIL)
        asked = replace(asked, trials=tuple(_trial(each, (9,), tmp_path) for each in study.trials))
    assert {trial.params["seed"] for trial in asked.trials} == {0, 1, 2}


@pytest.mark.parametrize("name", ["Random", "TPE", "NSGAII"])
def test_the_next_seed_is_another_search(name: str) -> None:
    """Two seeds have no trial in common, and the same seed gives the same trials."""

    def trials_of(seed: int) -> list[float]:
        given = {"_target_": f"optuna.samplers.{name}Sampler", "seed": seed}
        fresh = [optuna.create_study(sampler=space.sampler(given, done)) for done in range(6)]
        return [study.ask().suggest_float("lr", 0, 1) for study in fresh]

    drawn = [value for seed in range(4) for value in trials_of(seed)]
    assert len({*drawn}) == len(drawn) == 24
    assert trials_of(3) == drawn[-6:]


def test_a_seed_that_is_no_number_is_refused() -> None:
    for seed in (-1, "one"):
        with pytest.raises(ConfigError, match=f"RandomSampler, seed={seed}: "):
            space.sampler({"_target_": "optuna.samplers.RandomSampler", "seed": seed})


def test_a_stop_ends_each_wait_of_a_worker(begin: Begin) -> None:
    sweep = begin(*RUNGS, "hydra.sweeper.study_name=mine", "hydra.sweeper.n_trials=1")
    asked: list[None] = []  # it is asked to stop when it has looked so often

    def stopped() -> bool:
        asked.append(None)
        return len(asked) > 3

    def waits_for(path: Path) -> None:
        asked.clear()
        with file_lock(path, lambda: None):
            assert mine.next() is None
        assert len(asked) > 3
        asked.clear()

    mine = Worker(new_worker(sweep, WorkerFile()), stopped)
    journal = sweep.parent / "mine.optuna.flock"
    waits_for(sweep / "decision")
    waits_for(journal)
    piece = mine.next()
    assert piece is not None
    stand_in(piece, 0.5)
    with file_lock(journal, lambda: None):
        mine.settle(piece)
    (trial,) = FoundSearch.of(sweep).trials
    assert (trial.state, trial.values) == ("waiting", {}), "another worker reports it"
    waits_for(piece.run / "lock")  # another command trains it
    (trial,) = FoundSearch.of(sweep).trials
    assert trial.state == "waiting", "the worker, which still waits for uploads, has given it back"


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _work_until_killed(sweep: Path, phase: str) -> None:
    """Work as `train_all`, and be killed where `phase` says."""
    mine = worker(sweep)
    asked = space.ask

    def ask_and_die(*arguments: Any) -> None:
        asked(*arguments)
        _die()

    if phase == "after ask":
        space.ask = ask_and_die  # type: ignore[assignment]
    if phase == "freezing":
        trial_run.may_start_again = _die  # type: ignore[assignment]
    if phase == "frozen":
        trial_run.take = _die  # type: ignore[assignment]
    while piece := mine.next():
        if phase == "training":
            RunDir(piece.run).begin_attempt()
            _die()
        stand_in(piece, value_of(piece))
        if phase == "before report":
            _die()
        if phase == "after report" and piece.until:
            mine._told = lambda piece, told=mine._told: _die(told(piece))  # type: ignore[method-assign, misc]
        if phase == "before tell" and not piece.until:
            optuna.Study.tell = _die  # type: ignore[method-assign, assignment]
        mine.settle(piece)


PHASES = (
    *("after ask", "freezing", "frozen", "training"),
    *("before report", "after report", "before tell"),
)


def test_a_kill_in_any_phase_loses_nothing(begin: Begin) -> None:
    sweep = begin(*RUNGS, "hydra.sweeper.n_trials=9", "hydra.sweeper.eta=2")
    for phase in PHASES:
        child = get_context("fork").Process(target=_work_until_killed, args=(sweep, phase))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, phase
    train_all(worker(sweep))
    found = FoundSearch.of(sweep)
    assert found.ended
    assert len(found.trials) == 9
    assert all(trial.ended and trial.params for trial in found.trials)
    ranked = sorted(found.trials, key=lambda trial: found.rank(trial, 1))
    assert found.best == ranked[0]
    trained = [RunDir(sweep.parents[1] / trial.run).read() for trial in found.trials]
    # Only the piece whose training was killed was begun twice.
    pieces = sum(trial.rung for trial in found.trials)
    assert sum(len(record.attempts) for record in trained) == pieces + 1
    (killed,) = [
        one
        for record in trained
        for one in record.attempts
        if one.state != "paused" and one.state != "finished"
    ]
    assert (killed.state, killed.cause, killed.verdict) == ("interrupted", "rank killed", "requeue")
