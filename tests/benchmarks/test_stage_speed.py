"""Measures the speed of staging and of verifying half a gigabyte, beside a plain `cp`.

python -m pytest tests/benchmarks/test_stage_speed.py --benchmark-only
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data.places.stage import Stage
from hpctrain.data.places.verification import verify
from hpctrain.shards.format import write_shards
from hpctrain.shards.index import Index

SAMPLES, BYTES = 512, 2**20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "set"
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 256, (SAMPLES, BYTES), dtype=np.uint8)
    write_shards(folder, [("train", {"x": samples})], max_bytes=64 * 2**20)
    return folder


@pytest.fixture
def target(source: Path) -> Iterator[Path]:
    """Yield a folder in memory, so that no disk is measured."""
    folder = Path("/dev/shm/hpctrain-benchmark")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["cp", "stage", "verify"])
def test_copy(benchmark: Any, source: Path, target: Path, how: str) -> None:
    shards = Index.load(source).shards
    stages: list[Stage] = []

    def again() -> None:
        for stage in stages:  # remove the earlier copies, which is not measured
            stage.close()
        for path in target.iterdir():
            shutil.rmtree(path)
        for shard in shards:  # the page cache is then warm in every round
            (source / shard.path).read_bytes()

    def work() -> None:
        if how == "cp":
            subprocess.run(["cp", "-r", str(source), str(target)], check=True)
        elif how == "verify":
            verify(source, shards)
        else:
            stages.append(Stage(source, target, budget_bytes=2**40))
            stages[-1].plan(shards)
            for shard in shards:
                stages[-1].path(shard)

    benchmark.pedantic(work, setup=again, rounds=5, warmup_rounds=1)
    benchmark.extra_info["MB/s"] = SAMPLES * BYTES / benchmark.stats["min"] / 1e6
