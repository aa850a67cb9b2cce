"""What a rank holds while a model is initialised on two real ranks."""

import time

import pytest
import torch
from torch import nn

from hpctrain.config.schema import Config, ParallelConfig
from tests.parallel.live import Live
from tests.parallel.parity import spread
from tests.ranks import run_ranks

WIDTH, LAYERS = 256, 12


class Plain(nn.Module):
    """A model without `init_module`, which rank 0 builds for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Own(Plain):
    """The same model with `init_module`, so that its modules are initialised one by one."""

    def init_module(self, module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]


def initialised(kind: str, zero: int) -> tuple[int, int]:
    """Return the peak of the live bytes, and the live bytes at the end."""
    config = Config(parallel=ParallelConfig(dp_replicate=1, dp_shard=-1, zero=zero))
    build = Own if kind == "init_module" else Plain
    with Live() as live:
        model = spread(build, config)
        # On a busy machine, what was sent to the other rank has been alive for a moment longer.
        deadline, half = time.monotonic() + 60, 2 * LAYERS * (WIDTH * WIDTH + WIDTH)
        while (end := live.now()) > 1.01 * half and time.monotonic() < deadline:
            time.sleep(0.01)
    assert model.parameters
    return live.peak, end


@pytest.mark.parametrize("zero", [1, 3])
def test_modules_are_initialised_one_by_one(zero: int) -> None:
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    for peak, end in run_ranks(initialised, 2, "init_module", zero):
        assert end == pytest.approx(whole / 2, rel=0.01)
        # These are the largest module and its part for this rank.
        assert peak - end <= 2 * whole / LAYERS * 1.01


def test_only_rank_0_holds_the_whole() -> None:
    whole = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    (first, end), (other, _) = run_ranks(initialised, 2, "plain", 3)
    assert end == pytest.approx(whole / 2, rel=0.01)
    assert first - end >= whole
    assert other - end <= 3 * whole / LAYERS * 1.01
