"""What the marks of a step cost the training: seconds that a rank spends to say where it is.

python -m pytest tests/benchmarks/test_marks_cost.py --benchmark-only -s

A step begins, gets its batch, and is over: three marks. Beside them stands what a step measures of
itself anyway, one reading of a clock and an entry in a list.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest

from hpctrain import marks

STEPS = 300  # few, so that one round ends before another process gets the core


def marked() -> None:
    for step in range(STEPS):
        marks.begin_step()
        marks.go_on()
        marks.stepped(step)


def measured() -> None:
    times = []
    for _ in range(STEPS):
        times.append(time.monotonic())  # noqa: PERF401  one entry a step, as the meter makes it


@pytest.mark.parametrize("what", [marked, measured])
def test_marks(benchmark: Any, what: Callable[[], None]) -> None:
    marks.open_page().begin()
    benchmark.pedantic(what, rounds=500)
    print(f"{what.__name__}: {benchmark.stats.stats.min / STEPS * 1e6:.2f} us a step")
