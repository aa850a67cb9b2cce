"""Compares a trainer step with a bare PyTorch loop, on a model so small that overhead shows.

python -m pytest tests/benchmarks/test_step.py --benchmark-only -s

The trainers take turns within one run, and the medians are compared: see trainers.py. The first run
installs Lightning and Accelerate as test_loaders.py does with its packages.
"""

import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.loaders.environments import python_with
from tests.benchmarks.trainers import TRAINERS, TURNS, WARM
from tests.conftest import ROOT

PACKAGES = {"lightning": "lightning", "accelerate": "accelerate"}


Turns = list[list[float]]  # wall time and CPU time of a step in each turn, microseconds


def measure(data: Path) -> dict[str, Turns]:
    """The turns of each trainer."""
    processes = {
        name: subprocess.Popen(
            [python_with(PACKAGES.get(name, "")), "-m", "tests.benchmarks.trainers", name, data],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HPCTRAIN_LAUNCHER": "single"},
        )
        for name in TRAINERS
    }
    try:
        return _take_turns(processes)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _take_turns(processes: dict[str, subprocess.Popen[str]]) -> dict[str, Turns]:
    found: dict[str, Turns] = {name: [] for name in processes}
    for turn in range(TURNS):
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            if turn:
                process.stdin.write("\n")
            line = process.stdout.readline()
            assert line, f"{name} has ended"
            if turn >= WARM:
                found[name].append([float(word) for word in line.split()])
    return found


def test_step(benchmark: Any, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = benchmark.pedantic(measure, args=(digits,), rounds=1)
    with capsys.disabled():
        print("\nus a step         wall    more     CPU    more")
        bare_turns = found["bare loop"]
        for name, turns in found.items():
            row = f"{name:>12}"
            for kind in range(2):
                pairs = [(a[kind], b[kind]) for a, b in zip(turns, bare_turns, strict=True)]
                more = statistics.median(ours - bare for ours, bare in pairs)
                row += f"{statistics.median(ours for ours, _ in pairs):10.0f}{more:+8.0f}"
            print(row)
    assert found.keys() == TRAINERS.keys()
