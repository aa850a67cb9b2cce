"""A rank that works longer than the others is named; the waiting of the others does not count."""

import logging
import time

import torch
from torch import distributed

from hpctrain.config.rules.degrees import Degrees
from hpctrain.parallel.mesh import Mesh
from hpctrain.training.measuring.slow_ranks import Interval, SlowRanks, WorkClock, slowest
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


def steps_with_work(
    seconds: list[float],
) -> tuple[list[str], list[tuple[int | None, float]], list[float]]:
    """Work for so many seconds on each rank, then wait for the others.

    Returns:
        The lines; what each comparison has found: the slowest rank, and the largest memory; and
        the seconds of each rank for a sample.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    lines: list[str] = []
    found: list[tuple[int | None, float]] = []
    work = WorkClock()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    mesh = Mesh(Degrees(ranks), rank, torch.device("cpu"))
    of_a_sample: list[float] = []
    record = of_a_sample.extend
    slow_ranks = SlowRanks(mesh, rank, "n{}".format, least_s=0.0, record=record)
    try:
        for _ in range(2):
            began, worked = time.monotonic(), work()
            end = time.thread_time() + seconds[rank]
            while time.thread_time() < end:
                pass
            distributed.barrier()
            took = time.monotonic() - began
            own = Interval(took, work() - worked, 0.0, (100.0 + rank, 200.0 - rank), samples=20)
            compared = slow_ranks.compare(own)
            found.append((compared.slowest, sum(compared.memory)))
    finally:
        logging.getLogger().removeHandler(handler)
    work.close()
    slow_ranks.close()
    return lines, found, of_a_sample


def test_a_slow_rank_is_named_once_by_rank_0() -> None:
    (first, found, of_a_sample), (second, same, _) = run_ranks(steps_with_work, 2, [0.05, 0.4])
    (line,) = first  # the second time is too soon
    assert line.startswith("rank 1 (n1) is slow: in the last ")
    assert "times as long as the median of the other ranks" in line
    assert second == []
    assert found == same == [(1, 301.0)] * 2  # but each report has the slowest rank
    # Each rank had 10 samples in the second interval; the first one is not counted.
    assert len(of_a_sample) == 2
    assert of_a_sample[1] >= 0.04
    assert 0.005 <= of_a_sample[0] < of_a_sample[1]
