"""`checkpoint.every_s`: all ranks save after the same step, by rank 0's clock."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.part import Part
from hpctrain.engine.steps.saving import Timer
from tests.ranks import run_ranks
from tests.steps import Every, alone, step_of, trainer_of
from tests.training.test_late_numbers import Late, Squares, numbers

STEPS, RANKS = 12, 2


class Saved(Part):
    """Notes the steps after which the rank has saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_save(self, step: int, metrics: Mapping[str, float], folder: Path) -> None:
        self.steps.append(step)


def saves(folder: Path, late: bool, every: int | None, stop_at: int) -> list[int]:
    """Train on a rank whose clock ticks once per step, a hundred times as fast on rank 1.

    Returns the steps after which the rank has saved.
    """
    rank = distributed.get_rank()
    stop, saved = Stop(), Saved()
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
    step = step_of(model, task, optimizer, asking=[stop, timer])
    trainer = trainer_of(
        *(step, folder / "checkpoints", STEPS),
        Every(log=100, checkpoint=every),
        loader=numbers(STEPS),
        parts=[saved],
    )
    trainer.fit()
    return saved.steps


def on_ranks(folder: Path, **how: Any) -> list[int]:
    """Train on two ranks, which save after the same steps; return the steps."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    first, second = run_ranks(_saves, RANKS, folder, how)
    assert first == second
    steps: list[int] = first
    return steps


def _saves(folder: Path, how: dict[str, Any]) -> list[int]:
    return saves(folder, **how)


@pytest.mark.parametrize(
    ("late", "every", "steps"),
    [(False, None, [3, 6, 9, 12]), (True, None, [4, 8, 12]), (False, 5, [3, 5, 8, 10, 12])],
)
def test_all_ranks_save_after_the_same_step(
    late: bool, every: int | None, steps: list[int], tmp_path: Path
) -> None:
    assert on_ranks(tmp_path, late=late, every=every, stop_at=0) == steps
