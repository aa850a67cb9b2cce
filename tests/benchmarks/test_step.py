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
    bare = found["bare loop"]
    with capsys.disabled():
        print("\nus a step         wall    more  fastest tenth    more     CPU    more")
        for name, turns in found.items():
            wall, cpu = (
                (
                    statistics.median(turn[kind] for turn in turns),
                    statistics.median(a[kind] - b[kind] for a, b in zip(turns, bare, strict=True)),
                )
                for kind in range(2)
            )
            fast = _fastest(turns), _fastest(turns) - _fastest(bare)
            print(
                f"{name:>12}{wall[0]:10.0f}{wall[1]:+8.0f}{fast[0]:15.0f}{fast[1]:+8.0f}"
                f"{cpu[0]:8.0f}{cpu[1]:+8.0f}"
            )
    assert found.keys() == TRAINERS.keys()


def _fastest(turns: Turns) -> float:
    """The wall time that a tenth of the turns do not exceed: those that nothing disturbed."""
    return statistics.quantiles((wall for wall, _ in turns), n=10)[0]
