"""Tests of the helper `run_ranks`: results come by rank, and failures name their ranks."""

import os
import signal
import time

import pytest
import torch
from torch import distributed

from tests.ranks import RanksError, run_ranks


def total(factor: int) -> tuple[int, int, float]:
    value = torch.tensor(float(distributed.get_rank() + 1))
    distributed.all_reduce(value)
    return distributed.get_rank(), distributed.get_world_size(), factor * value.item()


def fail(which: int, then_wait: bool) -> None:
    if distributed.get_rank() == which:
        raise ValueError("this one is wrong")
    if then_wait:
        distributed.barrier()


def end(which: int, number: int) -> None:
    if distributed.get_rank() == which:
        os.kill(os.getpid(), number)
    distributed.barrier()


def hang(which: int) -> None:
    if distributed.get_rank() == which:
        time.sleep(1000)


@pytest.mark.parametrize("then_wait", [False, True])
def test_an_exception_is_told_with_its_rank(then_wait: bool) -> None:
    with pytest.raises(RanksError, match=r"rank 1 of 2: Traceback") as caught:
        run_ranks(fail, 2, 1, then_wait)
    assert "ValueError: this one is wrong" in str(caught.value)
    assert ("rank 0 of 2" in str(caught.value)) == then_wait
    assert len(run_ranks(total, 2, 1)) == 2


def test_a_rank_that_is_killed() -> None:
    with pytest.raises(RanksError, match=r"rank 1 of 2: the process ended with -9"):
        run_ranks(end, 2, 1, signal.SIGKILL)
    assert len(run_ranks(total, 2, 1)) == 2


def test_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(total, 2, 1)
    with pytest.raises(RanksError, match=r"rank 1 of 2: no answer in 5 s") as caught:
        run_ranks(hang, 2, 1, timeout=5)
    assert "rank 0" not in str(caught.value)
    assert len(run_ranks(total, 2, 1)) == 2
