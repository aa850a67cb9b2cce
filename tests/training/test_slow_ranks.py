"""A rank that works longer than the others is named; the waiting of the others does not count."""

import time

import torch
from torch import distributed

from hpctrain.addons.slow_ranks import Compared, SlowRanks, slowest
from hpctrain.config.rules.degrees import Degrees
from hpctrain.engine.parallel.mesh import Mesh
from hpctrain.engine.parts.clocks import Interval, WorkClock
from tests.ranks import run_ranks


def test_which_rank_is_slow() -> None:
    assert slowest([5.0, 5.2, 9.0, 4.9], 10.0, stage=4) == (2, 9.0 / 5.0, 4.0)
    assert slowest([5.0, 5.2, 7.0, 4.9], 10.0, stage=4) is None  # not by half
    assert slowest([0.1, 0.1, 0.9, 0.1], 10.0, stage=4) is None  # costs the others little
    assert slowest([1.0, 9.0], 10.0, stage=2) == (1, 9.0, 8.0)
    # The stages of a pipeline may have different work.
    assert slowest([1.0, 1.0, 9.0, 9.0], 10.0, stage=2) is None
    assert slowest([1.0, 1.0, 3.0, 9.0], 10.0, stage=2) == (3, 3.0, 6.0)
    assert slowest([1.0, 9.0], 10.0, stage=1) is None


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


Found = tuple[list[str], list[Compared]]


def steps_with_work(seconds: list[float]) -> Found:
    """Work so many seconds on each rank, then wait for the others.

    Returns:
        The notes, and what each comparison has found.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    said: list[str] = []
    found: list[Compared] = []
    mesh = Mesh(Degrees(ranks), rank, torch.device("cpu"))
    slow_ranks = SlowRanks(
        *(mesh, rank, "n{}".format, 0.0), say=lambda text, about: said.append(text)
    )
    work = WorkClock()
    # A machine that is busy may need more than two: all ranks find the same.
    while len(found) < 2 or (not any(each.lost_s for each in found) and len(found) < 20):
        began, worked = time.monotonic(), work()
        for _ in range(5):
            spin(seconds[rank] / 5)
            distributed.barrier()
        took = time.monotonic() - began
        own = Interval(*(took, work() - worked, 0.0, (100.0 + rank, 200.0 - rank)))
        found.append(slow_ranks.compare(own))
    work.close()
    return said, found


def test_a_slow_rank_is_named_once() -> None:
    (first, found), _ = run_ranks(steps_with_work, 2, [0.02, 0.6])
    (text,) = filter(None, first)  # the second time is too soon for another
    assert text.startswith("rank 1 (n1) is slow: in the last ")
    assert "times as long as the median of the other ranks" in text
    assert {each.memory for each in found} == {(101.0, 200.0)}
    assert any(each.lost_s > 0.1 for each in found)
