"""Throughput counts the time of training only."""

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.training.throughput import Throughput


def test_evaluation_and_checkpoints_do_not_lower_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("hpctrain.training.throughput.time.monotonic", lambda: clock.now)
    loader: Any = SimpleNamespace(wait_s=0.0)
    compared: list[tuple[float, ...]] = []
    slow_ranks: Any = SimpleNamespace(compare=lambda *seconds: compared.append(seconds))
    throughput = Throughput(loader, step=0, global_batch_size=8, slow_ranks=slow_ranks)
    clock.now += 2.0
    loader.wait_s += 0.5
    with throughput.paused():
        clock.now += 60.0
    assert throughput.metrics(4) == {
        "perf/samples_per_s": pytest.approx(4 * 8 / 2.0),
        "perf/data_wait_fraction": pytest.approx(0.25),
    }
    (trained_s, worked_s, waited_s), *_ = compared
    assert [trained_s, waited_s] == pytest.approx([2.0, 0.5])
    assert worked_s >= 0
    clock.now += 1.0  # the next report begins where the last one ended
    with throughput.paused():
        clock.now += 5.0
    clock.now += 1.0
    assert throughput.metrics(5) == {
        "perf/samples_per_s": pytest.approx(8 / 2.0),
        "perf/data_wait_fraction": 0.0,
    }
