"""From the command to the first step of 8 gloo ranks on this machine, with and without compilation.

python -m pytest tests/benchmarks/test_ranks_startup.py --benchmark-only -s

A small transformer, one thread a rank. "compiled again" is the next attempt of the same run, which
finds what the first one has compiled. Seconds until rank 0 reports a step; they are printed, never
asserted.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, run_module

RANKS = 8
TORCHRUN = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "hpctrain"]
SMALL = [
    *("experiment=stdlib_lm", "model.dim=64", "model.layers=4", "model.vocab_size=256"),
    *("data.windows.length=65", "data.windows.stride=64", "train.log_every=1"),
    *(f"train.global_batch_size={RANKS}", "tracking.enabled=false", "parallel.device=cpu"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "in").mkdir()
    for file in sorted((ROOT / "hpctrain" / "data").glob("*.py")):
        shutil.copy(file, folder / "in" / f"{file.stem}.txt")
    split = ("--split", "train=0.5,val=0.5")
    run_module("data_prep", "text", str(folder / "in"), str(folder / "data"), "--quiet", *split)
    return folder / "data"


def first_step(arguments: list[str], log: Path) -> float:
    """Start a training, wait for its first step, and stop it; return the seconds until the step."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    began = time.perf_counter()
    with (
        log.open("w") as said,
        subprocess.Popen(
            [sys.executable, "-m", *TORCHRUN, *arguments], stdout=said, stderr=said, env=env
        ) as process,
    ):
        while "step " not in (text := log.read_text()):
            assert process.poll() is None, text
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        process.terminate()
    return seconds


def measure(corpus: Path, folder: Path) -> dict[str, float]:
    found = {}
    for name, keys in {
        "eager": ["train.compile=off"],
        "compiled": ["train.compile=blocks"],
        "compiled again": ["train.compile=blocks"],
    }.items():
        runs = folder / name.split()[0]
        for checkpoints in runs.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)
        where = [f"data.path={corpus}", f"output_dir={runs}"]
        found[name] = first_step([*SMALL, *keys, *where], folder / f"{name}.log")
    return found


@pytest.mark.timeout(1800)
def test_first_step(
    benchmark: Any, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = benchmark.pedantic(measure, args=(corpus, tmp_path), rounds=1)
    with capsys.disabled():
        for name, seconds in found.items():
            print(f"\n{name:>15}: {seconds:6.1f} s", end="")
    assert len(found) == 3
