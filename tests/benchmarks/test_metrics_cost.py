"""What the metrics of a step cost the training, beside mlflow.log_metrics and Lightning's logger.

python -m pytest tests/benchmarks/test_metrics_cost.py --benchmark-only -s

All of them take turns in one process: training steps of some 10 ms, with one call for each step, up
to a report, then as many with the next one. Ours measures every step and reports into a journal, as
often as the default of `train.log_every` says; the others write the same values into SQLite at the
same steps. `nothing` is the same call with a meter and a tracker that do nothing: it shows what the
measurement itself takes. The uploader is another process and not a part of it. Times are those of
the clock, and of the CPU by this thread: on a busy machine the clock also counts the time of
others.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import PrecisionConfig
from hpctrain.job.building.build import LOG_EVERY
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import Precision
from hpctrain.tracking.tracker import JournalTracker, NullTracker, Tracker
from hpctrain.training.measuring.account import Account
from hpctrain.training.measuring.meter import Meter
from hpctrain.training.measuring.slow_ranks import SlowRanks
from tests.steps import NoMeter

EVERY = LOG_EVERY
TURNS, STEPS = 7, EVERY
STEP_US = 10_000.0
CPU = torch.device("cpu")
BATCH = {"image": torch.zeros(8, 64), "mask": torch.ones(8, dtype=torch.bool)}
VALUES = {f"train/metric_{number}": 0.1 * number for number in range(5)}
Step = Callable[[int], None]


class Feed:
    """The loader of a training, of which the meter reads three numbers."""

    wait_s, consumed, last = 0.0, 0, SimpleNamespace(group=SimpleNamespace(batch_size=8))

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}


def ours(folder: Path) -> tuple[Step, list[dict[str, float]]]:
    """Return a step of ours, and a list that gets the metrics of the reports."""
    feed: Any = Feed()
    tracker = JournalTracker(
        folder, uri=f"sqlite:///{folder}/x.db", experiment="e", run_name="r", uid="r", upload=False
    )
    tracker.start({}, {})
    ranks = SlowRanks(Mesh(Degrees(), 0, CPU), 0, str)
    precision = Precision(PrecisionConfig(), CPU)
    meter = Meter(feed, Account(time.monotonic()), ranks, precision, tracker)
    meter.begin(0)
    return measured(feed, meter, tracker)


def measured(
    feed: Feed, meter: Meter | NoMeter, tracker: Tracker
) -> tuple[Step, list[dict[str, float]]]:
    """Return a step with these, and a list that gets the metrics of the reports."""
    reports: list[dict[str, float]] = []

    def step(number: int) -> None:
        feed.consumed += 8
        meter.after_step(number, feed.consumed, BATCH)
        if number % EVERY == 0:
            with meter.spent("other"):
                metrics = VALUES | meter.report({"loss": 8.0})
                tracker.log_metrics(metrics, number)
            reports.append(metrics)

    return step, reports


def others(uri: str, reports: list[dict[str, float]]) -> dict[str, Step]:
    """Return steps that log the newest report, by the name of who does it."""
    import mlflow
    from lightning.pytorch.loggers import MLFlowLogger

    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("exp")
    mlflow.start_run(run_name="fluent")
    logger = MLFlowLogger("exp", "lightning", tracking_uri=uri)
    assert logger.run_id

    def fluent(number: int) -> None:
        if number % EVERY == 0:
            mlflow.log_metrics(reports[-1], step=number)

    def lightning(number: int) -> None:
        if number % EVERY == 0:
            logger.log_metrics(reports[-1], number)

    return {"mlflow.log_metrics": fluent, "Lightning MLFlowLogger": lightning}


def measure(folder: Path, uri: str) -> dict[str, list[tuple[float, float]]]:
    """Return the microseconds of each step, by the clock and of the CPU, by name."""
    mine, reports = ours(folder)
    nothing, _ = measured(Feed(), NoMeter(), NullTracker())
    steps = {"nothing": nothing, "hpctrain": mine, **others(uri, reports)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    train = training()
    for turn in range(TURNS):
        for name, step in steps.items():
            for number in range(turn * STEPS + 1, (turn + 1) * STEPS + 1):
                train()
                on_cpu, began = time.thread_time(), time.perf_counter()
                step(number)
                wall = time.perf_counter() - began
                taken[name].append((1e6 * wall, 1e6 * (time.thread_time() - on_cpu)))
    import mlflow

    mlflow.end_run()
    return taken


def training() -> Callable[[], None]:
    """Return a real training step of some 10 ms, which also spoils the caches."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 512)

    def step() -> None:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.filterwarnings("ignore")  # those of MLflow and of Lightning
@pytest.mark.usefixtures("group_of_one")
def test_metrics_cost(
    benchmark: Any, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.disable(logging.INFO)
    try:
        taken = benchmark.pedantic(measure, args=(tmp_path / "run", f"sqlite:///{store}"), rounds=1)
    finally:
        logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(
            f"\nus a step, a report every {EVERY}      mean  of 10 ms  p99 of all"
            "  without one: p50     p99   a report: p50"
        )
        for name, pairs in taken.items():
            for clock, values in zip(("clock", "CPU"), zip(*pairs, strict=True), strict=True):
                warm = values[EVERY:]
                mean = statistics.fmean(warm)
                reports = warm[EVERY - 1 :: EVERY]
                others = [value for k, value in enumerate(warm, 1) if k % EVERY]
                print(
                    f"{name:>22} {clock:>6}{mean:11.1f}{100 * mean / STEP_US:9.3f}%"
                    f"{_cut(warm, 99):12.1f}"
                    f"{_cut(others, 50):18.1f}{_cut(others, 99):8.1f}{_cut(reports, 50):16.0f}"
                )
    assert {len(values) for values in taken.values()} == {TURNS * STEPS}


def _cut(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
