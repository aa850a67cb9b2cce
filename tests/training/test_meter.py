"""What the training measures of itself counts each second once, and steps without what is between.

The clocks are set by hand, so that the expected values are exact. Events of a GPU are played by
objects with a time, because there is no GPU here.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.addons.slow_ranks import Compared
from hpctrain.config.metric_registry import registered
from hpctrain.engine.parts import clocks, meter
from hpctrain.engine.parts.clocks import Account, Interval, StepTimes
from hpctrain.engine.parts.meter import Meter
from tests.conftest import journal, only_run

CPU = torch.device("cpu")
BATCH = {"mask": torch.ones(8, dtype=torch.bool)}


class Clock:
    """All clocks of the meter, and the loader; the time passes when `spend` is called."""

    def __init__(self) -> None:
        self.now, self.work, self.wait_s, self.consumed = 100.0, 7.0, 0.0, 0
        self.compiled = 0.0

    def spend(self, work: float = 0.0, wait: float = 0.0, asleep: float = 0.0) -> None:
        self.now += work + wait + asleep
        self.work += work
        self.wait_s += wait

    last = SimpleNamespace(group=SimpleNamespace(batch_size=8))

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}


class Work:
    """The clock of the main thread's work."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self) -> float:
        return self._clock.work

    def close(self) -> None:
        pass


class Notes:
    """A tracker that keeps the records of time."""

    def __init__(self) -> None:
        self.times: list[tuple[dict[str, float], int, float]] = []

    def log_time(self, seconds: dict[str, float], step: int, device_s: float) -> None:
        self.times.append((seconds, step, device_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    time = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    for module in (clocks, meter):
        monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(meter, "WorkClock", lambda: Work(clock))
    monkeypatch.setattr(meter, "_compiled_s", lambda: clock.compiled)
    return clock


def made(clock: Clock, devices: int = 1, compute: str = "fp32", **options: Any) -> tuple[Any, ...]:
    """Return a meter, its account and notes, and the intervals that it has compared."""
    compared: list[Interval] = []

    def compare(interval: Interval) -> Compared:
        compared.append(interval)
        return Compared(interval.memory)

    ranks: Any = SimpleNamespace(compare=compare, close=lambda: None)
    precision: Any = SimpleNamespace(device=CPU, compute=compute, scale=1024.0)
    notes, loader = Notes(), clock
    book = Account(clock.now - 9.0, devices, before_s=1000.0)
    measured = Meter(loader, book, ranks, precision, notes, **options)  # type: ignore[arg-type]
    return measured, book, notes, compared


def step(measured: Meter, clock: Clock, number: int, **seconds: float) -> None:
    clock.spend(**seconds)
    clock.consumed += 8
    measured.after_step(number, clock.consumed, BATCH)


def test_each_second_is_in_one_part_and_steps_are_without_what_is_between(clock: Clock) -> None:
    measured, _, notes, compared = made(clock, devices=2)
    clock.spend(work=1.0)  # the start-up goes on until the first batch is asked for
    measured.begin(0)
    step(measured, clock, 1, work=1.0, wait=0.5)
    with measured.spent("evaluation"):
        clock.spend(work=60.0)
    step(measured, clock, 2, work=0.5, asleep=1.0)
    with measured.spent("checkpoint"):
        clock.spend(work=30.0)
    step(measured, clock, 3, work=1.0)
    assert measured.report({"loss": 24.0}) == pytest.approx(
        {
            "perf/samples_per_s": 24 / 4.0,
            "perf/samples_seen": 24,
            "perf/data_wait_fraction": 0.5 / 4.0,
            "perf/communication_fraction": 1.0 / 4.0,
            "perf/step_ms_p50": 1500,
            "perf/step_ms_p95": 1500,
            "perf/step_ms_max": 1500,
            "perf/checkpoint_s": 30,
        }
    )
    assert measured.evaluated() == {"perf/evaluation_s": 60}
    assert [one[:3] for one in compared] == [pytest.approx((4.0, 2.5, 0.5))]
    # The next report begins where the last one ended, and the report itself is no step.
    with measured.spent("other"):
        clock.spend(work=2.0)
    step(measured, clock, 4, work=2.0)
    assert measured.report({})["perf/step_ms_max"] == pytest.approx(2000)
    assert compared[1][:3] == pytest.approx((2.0, 2.0, 0.0))
    clock.spend(work=1.0)  # what comes after the last step is no step
    measured.close()
    assert [number for _, number, _ in notes.times] == [2, 3, 4, 4]  # the first is the checkpoint's
    seconds, _, device_s = notes.times[-1]
    assert seconds == pytest.approx(
        {
            "startup": 10,
            "compile": 0,
            "compute": 4.5,
            "communication": 1,
            "data_wait": 0.5,
            "checkpoint": 30,
            "evaluation": 60,
            "other": 3,
            "slow_rank": 0,
        }
    )
    assert device_s == pytest.approx(1000 + 2 * sum(seconds.values()))


def test_compiling_is_neither_work_nor_communication(clock: Clock) -> None:
    measured, _, notes, _ = made(clock, devices=2)
    measured.begin(0)
    clock.compiled += 20.0
    step(measured, clock, 1, work=5.0, asleep=20.0)
    found = measured.report({})
    assert found["perf/communication_fraction"] == 0
    seconds, *_ = notes.times[-1]
    assert (seconds["compile"], seconds["compute"]) == pytest.approx((20, 5))


def test_samples_and_tokens_are_exact_through_a_resume(clock: Clock) -> None:
    measured, *_ = made(clock, counts_tokens=True, compute="fp16")
    measured.begin(0)
    step(measured, clock, 1, work=1.0)
    clock.consumed += 3  # the rest of the epoch, which is left out
    step(measured, clock, 2, work=1.0)
    found = measured.report({"loss": 250.0})
    assert (found["perf/samples_seen"], found["perf/tokens_seen"]) == (16, 250)
    assert found["perf/tokens_per_s"] == 125
    assert found["perf/loss_scale"] == 1024
    saved = json.loads(json.dumps(measured.state_dict()))
    resumed, *_ = made(clock, counts_tokens=True)
    resumed.load_state_dict(saved)
    resumed.begin(2)
    clock.spend(work=1.0)
    clock.consumed += 5  # the last batch of an epoch, filled up
    resumed.after_step(3, clock.consumed, BATCH)
    found = resumed.report({"loss": 50.0})
    assert (found["perf/samples_seen"], found["perf/tokens_seen"]) == (21, 300)
    assert found["perf/samples_per_s"] == 5
    old, *_ = made(clock)
    old.load_state_dict({})  # a checkpoint of an older version
    old.begin(3)
    assert old.report({})["perf/samples_seen"] == clock.consumed


class Event:
    """An event of a GPU: the time on the device at which it passes."""

    device_ms = 0.0

    def __init__(self) -> None:
        self.at = Event.device_ms

    def elapsed_time(self, after: "Event") -> float:
        return after.at - self.at

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def test_the_steps_of_a_gpu_are_timed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_event", Event)
    monkeypatch.setattr(clocks, "_PENDING", 3)
    times = StepTimes(torch.device("cuda"))
    times.begin()
    for took in (1.0, 2.0, 3.0, 4.0, 5.0):
        Event.device_ms += took
        times.step()
    Event.device_ms += 100.0  # an evaluation
    times.begin()
    Event.device_ms += 6.0
    times.step()
    assert times.take() == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.005, 0.006])
    Event.device_ms += 7.0
    times.step()
    assert times.take() == pytest.approx([0.007])


def test_a_run_logs_registered_metrics_and_where_its_time_went(train: Any, tmp_path: Path) -> None:
    train("train.max_steps=50", "checkpoint.every_steps=25", "tracking.upload=false")
    run = only_run(tmp_path)
    logged = {name for r in journal(run) if r["kind"] == "metrics" for name in r["metrics"]}
    known = {metric.name for metric in registered()}
    ours = {name for name in logged if name.partition("/")[0] in ("perf", "best")}
    assert {"perf/step_ms_p95", "perf/evaluation_s", "perf/checkpoint_s"} <= ours <= known
    times = [r for r in journal(run) if r["kind"] == "time"]
    # The first report, each checkpoint and the end; other reports only if a second has passed.
    steps = [r["step"] for r in times]
    assert (steps[:2], steps[-2:]) == ([20, 25], [50, 50])
    first = journal(run)[0]["time"]
    for one in times:
        total = sum(one["seconds"].values())
        assert total == pytest.approx(one["device_s"], abs=0.01)
        assert total > one["time"] - first  # the process began before the journal
