"""Tests of `bench`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpctrain.errors import ConfigError
from hpctrain.insight.bench.bench import _limit, main
from hpctrain.insight.bench.parts import PartFigures, step_seconds
from tests.conftest import ROOT


def part(rate: float, p50: float = 10.0) -> PartFigures:
    return PartFigures(rate, p50, p50)


def test_the_figures_of_steps() -> None:
    """Two ranks, whose steps wait for the slower one."""
    seconds = [[0.1] * 9 + [0.2], [0.1] * 10]
    found = PartFigures.of(seconds, 64, step_bytes=1.1e6, step_flops=1e9, peak=1e11)
    assert found.samples_per_s == pytest.approx(64 / 0.11)
    assert (found.p50_ms, found.p95_ms) == (100.0, 200.0)
    assert found.mb_per_s == pytest.approx(10.0)
    assert found.mfu_percent == pytest.approx(100 * 1e9 / 0.11 / 1e11)
    assert (
        PartFigures.of(seconds, 64, step_flops=1e9).mfu_percent is None
    )  # the hardware is unknown


def test_what_limits() -> None:
    fast, slow, compute = part(1000), part(100), part(200)
    assert _limit({"data": slow}, "more threads") == ""
    assert "times what the steps take: more threads." in _limit(
        {"data": slow, "compute": compute}, "more threads"
    )
    for parts in ({"data": fast, "compute": compute}, {"compute": compute}):
        assert _limit(parts, "more threads") == "Computing limits."


def test_warm_up_is_not_measured() -> None:
    calls: list[int] = []
    found = step_seconds(lambda: calls.append(1), torch.device("cpu"), 7)
    assert (len(found), len(calls)) == (7, 12)
    assert min(found) >= 0


def test_a_benchmark(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It leaves nothing behind."""
    monkeypatch.setenv("HPCTRAIN_LAUNCHER", "single")
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "data.prefetch_mb=1"]
    argv = ["experiment=digits", *where, "--steps=5", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["parts"]) == ["data", "compute", "whole"]
    assert all(each["samples_per_s"] > 0 for each in found["parts"].values())
    assert found["parts"]["data"]["mb_per_s"] > 0
    assert found["limit"]
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps=2"], "at least 5"),
        (["--against=a.json"], "no option of bench"),
        (["--stesp=2"], "no option of bench"),
        (["seed=1,2"], "2 runs"),
        ([], "data.path is missing"),
        (["--sample-shape=9"], "no option of bench"),
        (["optimizer.lrr=1"], "optimizer.lr"),
    ],
)
def test_wrong_arguments(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCTRAIN_LAUNCHER", "single")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        main(argv)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks(digits: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "hpctrain"]
    argv += ["bench", "experiment=digits", f"data.path={digits}", f"output_dir={tmp_path}/runs"]
    done = subprocess.run(
        [*argv, "--steps=5", "--json", "data.prefetch_mb=1"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["parts"]) == ["data", "compute", "whole"]
    assert found["setup"]["ranks"] == 2
    assert list((tmp_path / "runs").iterdir()) == []
