"""`train.eval_every_s`: all ranks evaluate after the same step, by the clock of rank 0."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.faults.stop import Stop
from hpctrain.shards.types import Batch
from hpctrain.tracking.tracker import NullTracker
from hpctrain.training.measuring.evaluation_timer import EvaluationTimer
from hpctrain.training.step import TrainStep
from hpctrain.training.trainer import Every
from tests.ranks import run_ranks
from tests.steps import alone, trainer_of
from tests.training.test_late_numbers import Late, Squares, numbers

STEPS, RANKS = 12, 2


class OneBatch:
    """The feed of an evaluation on one batch."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"consumed": 0}

    def __iter__(self) -> Iterator[Batch]:
        yield {"x": torch.arange(2), "mask": torch.ones(2, dtype=torch.bool)}

    def close(self) -> None:
        """There is nothing to close."""


class Evaluated(NullTracker):
    """Notes the steps that have a metric of the evaluation."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        if "val/loss" in metrics:
            self.steps.append(step)


def evaluations(folder: Path, late: bool, every: int, stop_at: int) -> list[int]:
    """Train on a rank whose clock ticks once per step, a hundred times as fast on rank 1.

    Returns:
        The steps after which the rank has evaluated.
    """
    rank = distributed.get_rank()
    stop, tracker = Stop(), Evaluated()
    model = alone(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters, lr=0.1)
    task = Squares(stop, stop_at, None)

    def seconds() -> float:
        return task.step * (100.0 if rank else 1.0)

    class Timer(EvaluationTimer):
        """One whose numbers are on their way, as from a GPU."""

        def restart(self) -> None:
            super().restart()
            if late:
                self._totals = Late([])

    timer = Timer(3.0, decides=rank == 0, clock=seconds)
    if late:
        timer._totals, stop._totals = Late([]), Late([])
    # The evaluation calls the task, too, and so takes one second of rank 0's clock.
    step = TrainStep(model, task, optimizer, clip_norm=None, stop=stop, timer=timer)
    trainer = trainer_of(
        *(step, folder / "checkpoints", STEPS, Every(log=100, evaluate=every, checkpoint=100)),
        loader=numbers(STEPS),
        evaluations={"val": OneBatch()},
        tracker=tracker,
    )
    trainer.fit()
    return tracker.steps


def on_ranks(folder: Path, **how: Any) -> list[int]:
    """Train on two ranks, which evaluate after the same steps; return the steps."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    first, second = run_ranks(_evaluations, RANKS, folder, how)
    assert first == second
    steps: list[int] = first
    return steps


def _evaluations(folder: Path, how: dict[str, Any]) -> list[int]:
    return evaluations(folder, **how)


@pytest.mark.parametrize(
    ("late", "every", "steps"),
    [
        (False, 100, [3, 6, 9, 12]),
        (True, 100, [4, 8, 12]),  # one step later, and a flag on its way asks for nothing more
        (False, 5, [3, 5, 8, 10, 12]),  # an evaluation by steps begins the seconds anew
    ],
)
def test_all_ranks_evaluate_after_the_same_step(
    late: bool, every: int, steps: list[int], tmp_path: Path
) -> None:
    assert on_ranks(tmp_path, late=late, every=every, stop_at=0) == steps


def test_the_seconds_go_on_after_a_resume(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, late=False, every=100, stop_at=2) == []
    assert on_ranks(tmp_path, late=False, every=100, stop_at=0) == [3, 6, 9, 12]


def test_without_seconds_nothing_is_added_to_the_reduction() -> None:
    timer = EvaluationTimer()
    timer.offer([])
    assert (timer.flags(), timer.is_due(), timer.state_dict()) == ([], False, {})
