"""`eval_every_s`, `checkpoint.every_s`: all ranks do it after the same step, by rank 0's clock."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.faults.stop import Stop
from hpctrain.shards.types import Batch
from hpctrain.tracking.tracker import NullTracker
from hpctrain.training.hooks import Hook, Hooks, RunState
from hpctrain.training.measuring.timer import Timer
from hpctrain.training.run_parts import Every
from hpctrain.training.step import TrainStep
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


class Saved(Hook):
    """Notes the steps after which the rank has saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_save(self, state: RunState, folder: Path) -> None:
        self.steps.append(state.step)


def evaluations(
    folder: Path, late: bool, every: int | None, stop_at: int, saves: bool = False
) -> list[int]:
    """Train on a rank whose clock ticks once per step, a hundred times as fast on rank 1.

    Returns:
        The steps after which the rank has evaluated, or has saved if the timer is that of `saves`.
    """
    rank = distributed.get_rank()
    stop, tracker, saved = Stop(), Evaluated(), Saved()
    model = alone(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters, lr=0.1)
    task = Squares(stop, stop_at, None)

    def seconds() -> float:
        return task.step * (100.0 if rank else 1.0)

    class Clocked(Timer):
        """One whose numbers are on their way, as from a GPU."""

        def restart(self) -> None:
            super().restart()
            if late:
                self._totals = Late([])

    timer = Clocked(3.0, decides=rank == 0, clock=seconds)
    if late:
        timer._totals, stop._totals = Late([]), Late([])
    # The evaluation calls the task, too, and so takes one second of rank 0's clock.
    timers = {"save_timer" if saves else "timer": timer}
    step = TrainStep(model, task, optimizer, clip_norm=None, stop=stop, **timers)
    trainer = trainer_of(
        *(step, folder / "checkpoints", STEPS),
        Every(log=100, evaluate=100 if saves else every, checkpoint=every if saves else None),
        loader=numbers(STEPS),
        evaluations={} if saves else {"val": OneBatch()},
        tracker=tracker,
        hooks=Hooks([saved]),
    )
    trainer.fit()
    return saved.steps if saves else tracker.steps


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


@pytest.mark.parametrize(
    ("late", "every", "steps"),
    [
        (False, None, [3, 6, 9, 12]),
        (True, None, [4, 8, 12]),
        (False, 5, [3, 5, 8, 10, 12]),
    ],
)
def test_all_ranks_save_after_the_same_step(
    late: bool, every: int | None, steps: list[int], tmp_path: Path
) -> None:
    assert on_ranks(tmp_path, late=late, every=every, stop_at=0, saves=True) == steps


def test_the_seconds_go_on_after_a_resume(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, late=False, every=100, stop_at=2) == []
    assert on_ranks(tmp_path, late=False, every=100, stop_at=0) == [3, 6, 9, 12]


def test_without_seconds_nothing_is_added_to_the_reduction() -> None:
    timer = Timer()
    timer.offer([])
    assert (timer.flags(), timer.is_due(), timer.state_dict()) == ([], False, {})
