"""Tests of workers without training: a stand-in writes what a training leaves in run.json."""

from hpctrain.runs.run_dir import RunDir
from hpctrain.search.trials import Found
from hpctrain.search.workers import Piece, Worker
from tests.search.conftest import Begin, worker

RUNGS = ("train.max_steps=9", "hydra.sweeper.rungs=[1,3]", "optimizer.lr=range(1,28)")


def stand_in(piece: Piece, value: float) -> float:
    """Leave in the run directory what a training up to `piece.until` leaves."""
    run = RunDir(piece.run)
    with run.lock():
        run.begin_attempt()
        step = piece.until or 9
        state = "paused" if piece.until else "finished"
        run.end_attempt(state, result={"step": step, piece.metric: value})
    return value


def value_of(piece: Piece) -> float:
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
                each.report(piece, stand_in(piece, value_of(piece)))


def test_the_best_of_each_rung_is_promoted(begin: Begin) -> None:
    sweep = begin(*RUNGS, "hydra.sweeper.n_trials=27", "hydra/sweeper/sampler=random")
    train_all(worker(sweep), worker(sweep))
    found = Found.of(sweep)
    assert found is not None
    for each in found.trials:
        print(each)
    assert found.ended
