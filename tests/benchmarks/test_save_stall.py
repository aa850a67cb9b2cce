"""Compares saves that a training waits for with saves in the background: 25 M parameters, AdamW.

    waits         the training waits until the checkpoint is committed
    background    the training waits for the copy, and later for the commit; both are the "stall"

The two ways take turns, and the medians of their ratios count. CPU seconds are those of the
training's process. The model has 48 layers, as it is not the bytes alone that take time. The step
after the commit tells all ranks of it. On a GPU each time ends when the GPU has done its work.

python -m pytest tests/benchmarks/test_save_stall.py --benchmark-only -s
python -m tests.benchmarks.test_save_stall --device cuda
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.config.schema import ParallelConfig
from hpctrain.engine.checkpoint.checkpointer import Checkpointer
from hpctrain.engine.distributed.group import process_group
from hpctrain.models import MLP
from hpctrain.runs.checkpoints.manifest import checkpoints
from hpctrain.tasks import Classification
from tests.steps import ALONE, alone, batch, here, step_of

TURNS = 7
CPU = torch.device("cpu")


@contextmanager
def timed(into: dict[str, list[float]], name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    into.setdefault(name, []).append(time.perf_counter() - wall)
    into.setdefault(f"{name}, CPU", []).append(time.process_time() - cpu)


def measured(folder: Path, device: torch.device = CPU, width: int = 720) -> dict[str, float]:
    """Return the median seconds of each part of the two ways, and of a step beside them."""
    model = alone(MLP(64, [width] * 48, 10), device=device)
    samples = {name: values.to(device) for name, values in batch(64).items()}
    step = step_of(model, Classification(), torch.optim.AdamW(model.parameters, lr=1e-3))
    saved = Checkpointer(folder, 2, here(), model, step.optimizer)
    saved.saves.start_writers(16 << 30)
    step.exchange.asking.append(saved.saves)
    step(samples, 1e-3)
    found: dict[str, list[float]] = {}
    for turn in range(-1, TURNS):
        now = found if turn >= 0 else {}  # the first ones make memory and start the writer
        with timed(now, "waits"):
            saved.save(2 * turn + 4, {})
        for _ in range(3):
            with timed(now, "step"):
                step(samples, 1e-3)
        began = time.perf_counter()
        with timed(now, "copy"):
            saved.save(2 * turn + 5, {}, background=True)
        while saved.saves.under_way:
            with timed(now, "step while it is written"):
                step(samples, 1e-3)
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


def size_mib(folder: Path) -> float:
    """Return the size of a checkpoint in `folder`."""
    return sum(path.stat().st_size for path in next(folder.glob("step-*")).iterdir()) / 2**20


def table(found: dict[str, float], size: float) -> str:
    """Return the seconds as lines, beside those of a save that the training waits for."""
    rows = (
        f"{name:30} {seconds:8.4f} s   {seconds / found['waits']:6.3f} of waiting"
        for name, seconds in found.items()
    )
    return "\n".join((f"a checkpoint of {size:.0f} MiB", *rows))


@pytest.mark.usefixtures("group_of_one")
def test_save_stall(benchmark: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    found = benchmark.pedantic(measured, args=(folder,), rounds=1)
    print(f"\n{table(found, size_mib(folder))}")
    assert found["waits"] > 0


def main() -> None:
    """Measure on one device; the last two lines are a note and the figures as JSON."""
    parser = argparse.ArgumentParser(description="Measure the stall of a save.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=720, help="720: 282 MiB with AdamW's state")
    given = parser.parse_args()
    with (
        process_group(ALONE, ParallelConfig(device=given.device)),
        tempfile.TemporaryDirectory() as made,
    ):
        folder = Path(made, "checkpoints")
        found = measured(folder, torch.device(given.device), given.width)
        size = size_mib(folder)
    print(table(found, size))
    ratios = {name: found[name] / found["waits"] for name in ("stall", "copy to commit")}
    slower = found["step while it is written"] / found["step"]
    print(
        f"{size:.0f} MiB: stall {ratios['stall']:.3f}, copy to commit "
        f"{ratios['copy to commit']:.2f} of a save that is waited for; steps {slower:.3f}"
    )
    print(
        json.dumps({"MiB": size, "steps while it is written": slower, **ratios, "seconds": found})
    )


if __name__ == "__main__":
    main()
