"""The size of micro-batches follows from the memory. It is simulated: a CPU has no limit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpctrain.config.schema import DataConfig
from hpctrain.data.shards.types import Batch
from hpctrain.engine.supervised.micro_batches import GpuMemory, MicroBatches
from hpctrain.engine.supervised.step import TrainStep
from hpctrain.models import MLP
from hpctrain.tasks import Classification, Sums
from tests.ranks import run_ranks
from tests.steps import alone, batch, make, step_of, weights

pytestmark = pytest.mark.usefixtures("group_of_one")


class Simulated(Classification, GpuMemory):
    """A task whose rows take memory on a simulated device with a limit; units are arbitrary."""

    error: RuntimeError = torch.OutOfMemoryError("simulated")

    def __init__(self, size: float, per_row: float = 10.0, state: float = 50.0) -> None:
        super().__init__()
        self.limit, self.per_row, self.used, self.most = size, per_row, state, 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Sums:
        needed = self.used + self.per_row * len(batch["mask"])
        if needed > self.limit:
            raise self.error
        self.most = max(self.most, needed)
        return super().__call__(model, batch)

    def restart(self) -> None:
        self.most = 0.0

    def peak(self) -> float:
        return self.most

    def size(self) -> float:
        return self.limit


def step(
    task: Simulated, record: Callable[[int], None], auto: bool, rows: int = 32
) -> tuple[TrainStep, MicroBatches]:
    torch.manual_seed(0)
    model = alone(MLP(64, [16], 10))
    made = MicroBatches(model, rows, record, task if auto else None)
    optimizer = torch.optim.AdamW(model.parameters)
    return step_of(model, task, optimizer), made


@pytest.mark.parametrize(
    ("size", "rows"),
    # The rows are the largest power of two with 50 + 10 rows <= 0.9 size, but at most 32.
    [(1000.0, 32), (400.0, 16), (130.0, 4), (70.0, 1)],
)
def test_auto_takes_the_largest_that_fits(size: float, rows: int) -> None:
    found: list[int] = []
    (auto, sizes), plain = step(Simulated(size), found.append, auto=True), make()
    for seed in range(5):
        auto(batch(32, seed), 1e-3)
        sizes.after_step(seed, {})
        plain(batch(32, seed), 1e-3)
    assert found == [rows] == [sizes.rows]
    assert torch.allclose(weights(auto), weights(plain), atol=1e-6), "training goes on meanwhile"


def test_a_batch_that_is_one_piece_is_never_split() -> None:
    """Packed samples have no rows to split."""
    place: Any = SimpleNamespace(config=SimpleNamespace(data=DataConfig(collate="pack")))
    assert MicroBatches.of(64, place, alone(MLP(64, [], 10))) is None
    whole = make()  # this step has no MicroBatches either
    whole.task = Simulated(250.0)
    with pytest.raises(torch.OutOfMemoryError):
        whole(batch(32), 1e-3)
    assert whole.model.accumulate == 1


def two_ranks() -> tuple[int, int]:
    from torch import distributed

    found: list[int] = []
    # Rank 1 has less memory, so rank 0 must not take more rows than fit there.
    limit = 1000.0 if distributed.get_rank() == 0 else 150.0
    made, sizes = step(Simulated(limit), found.append, True, 16)
    for seed in range(4):
        made(batch(16, seed), 1e-3)
        sizes.after_step(seed, {})
    return found[0], made.model.accumulate


def test_all_ranks_take_what_fits_on_each() -> None:
    assert run_ranks(two_ranks, 2) == [(8, 2), (8, 2)]
