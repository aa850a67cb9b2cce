"""Compares saves that a training waits for with saves in the background: 25 M parameters, AdamW.

    waits         the training waits until the checkpoint is committed
    background    the training waits for the copy, and later for the commit; both are the "stall"

The two ways take turns, and the medians of their ratios count. CPU seconds are those of the
training's process. The model has 48 layers, as it is not the bytes alone that take time. The step
after the commit tells all ranks of it.

python -m pytest tests/benchmarks/test_save_stall.py --benchmark-only -s
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.checkpointer import Checkpointer
from hpctrain.checkpoint.files.manifest import checkpoints
from hpctrain.faults.stop import Stop
from hpctrain.models import MLP
from hpctrain.tasks import Classification
from hpctrain.training.step import TrainStep
from tests.steps import alone, batch, here

TURNS = 7


@contextmanager
def timed(into: dict[str, list[float]], name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    into.setdefault(name, []).append(time.perf_counter() - wall)
    into.setdefault(f"{name}, CPU", []).append(time.process_time() - cpu)


def measured(folder: Path) -> dict[str, float]:
    """Return the median seconds of each part of the two ways, and of a step beside them."""
    model = alone(MLP(64, [720] * 48, 10))
    step = TrainStep(
        *(model, Classification(), torch.optim.AdamW(model.parameters, lr=1e-3)),
        clip_norm=None,
        stop=Stop(),
    )
    saved = Checkpointer(folder, 2, here(), model, step.optimizer)
    saved.saves.start_writers(1 << 30)
    step.saving = saved.saves
    step(batch(64), 1e-3)
    found: dict[str, list[float]] = {}
    for turn in range(-1, TURNS):
        now = found if turn >= 0 else {}  # the first ones make memory and start the writer
        with timed(now, "waits"):
            saved.save(2 * turn + 4, {})
        for _ in range(3):
            with timed(now, "step"):
                step(batch(64), 1e-3)
        began = time.perf_counter()
        with timed(now, "copy"):
            saved.save(2 * turn + 5, {}, background=True)
        while saved.saves.under_way:
            with timed(now, "step while it is written"):
                step(batch(64), 1e-3)
            with timed(now, "advance"):
                saved.saves.advance()
            if not now.get("end") and checkpoints(folder)[0] == saved.path(2 * turn + 5):
                now["end"] = [time.perf_counter()]
        now.setdefault("copy to commit", []).append(now.pop("end")[0] - began)
        now.setdefault("copy to the step after", []).append(time.perf_counter() - began)
        for kind in ("", ", CPU"):
            commit = sum(now.pop(f"advance{kind}"))
            now.setdefault(f"commit{kind}", []).append(commit)
            now.setdefault(f"stall{kind}", []).append(now[f"copy{kind}"][-1] + commit)
    saved.saves.close()
    return {name: statistics.median(values) for name, values in found.items()}


@pytest.mark.usefixtures("group_of_one")
def test_save_stall(benchmark: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    found = benchmark.pedantic(measured, args=(folder,), rounds=1)
    size = sum(path.stat().st_size for path in next(folder.glob("step-*")).iterdir())
    print(f"\na checkpoint of {size / 2**20:.0f} MiB")
    for name, seconds in found.items():
        print(f"{name:30} {seconds:8.4f} s   {seconds / found['waits']:6.3f} of waiting")
    assert found["waits"] > 0
