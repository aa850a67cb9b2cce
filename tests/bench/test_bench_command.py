"""Tests of `bench`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from hpctrain.bench import step_times
from hpctrain.bench.bench import main
from hpctrain.errors import ConfigError
from hpctrain.estimates.bench_figures import Figures, Part, quantile
from tests.conftest import ROOT

CURES = {"data": "more threads"}


def part(rate: float, p50: float = 10.0) -> Part:
    return Part(rate, p50, p50)


def figures(**parts: Part) -> Figures:
    return Figures({"ranks": 2}, parts)


def test_the_figures_of_steps() -> None:
    """Two ranks, whose steps wait for the slower one."""
    seconds = [[0.1] * 9 + [0.2], [0.1] * 10]
    found = Part.of(seconds, 64, step_bytes=1.1e6, step_flops=1e9, peak=1e11)
    assert found.samples_per_s == pytest.approx(64 / 0.11)
    assert (found.p50_ms, found.p95_ms) == (100.0, 200.0)
    assert found.mb_per_s == pytest.approx(10.0)
    assert found.mfu_percent == pytest.approx(100 * 1e9 / 0.11 / 1e11)
    assert Part.of(seconds, 64, step_flops=1e9).mfu_percent is None  # the hardware is unknown
    assert [quantile([3.0, 1.0, 2.0, 4.0], each) for each in (0.0, 0.5, 0.95)] == [1.0, 2.0, 4.0]


def test_what_limits() -> None:
    assert figures(data=part(100)).limit(CURES) == ""
    assert "take: more threads." in figures(data=part(100), compute=part(200)).limit(
        {"data": "more threads"}
    )
    assert "Computing limits" in figures(data=part(1000), compute=part(200)).limit(
        {"data": "more threads"}
    )
    sent = part(1000, 5.0)
    assert "50% of a step" in figures(compute=part(200), communication=sent).limit(
        {"data": "more threads"}
    )
    assert figures(compute=part(200)).limit(CURES) == "Computing limits."  # no loader was measured


def test_what_is_slower_than_before() -> None:
    before = figures(compute=part(100), whole=part(100))
    now = figures(compute=part(95), whole=part(80), data=part(1))
    assert [line.partition(":")[0] for line in now.slower(before, 10)] == ["whole"]
    assert len(now.slower(before, 1)) == 2
    assert now.slower(before, 25) == []


def test_only_the_same_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    before = figures(compute=part(100))
    before.save(path)
    assert Figures.load(path) == before
    other = replace(before, setup={"ranks": 4, "device": "NVIDIA H100"})
    with pytest.raises(
        ConfigError, match="device was None and is NVIDIA H100; ranks was 2 and is 4"
    ):
        other.check_comparable(before, path)
    path.write_text('{"parts": 1}')
    with pytest.raises(ConfigError, match="not a file of bench --save"):
        Figures.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        Figures.load(tmp_path / "nothing")


def test_warm_up_is_not_measured() -> None:
    calls: list[int] = []
    found = step_times.measured(lambda: calls.append(1), torch.device("cpu"), 3, 7)
    assert (len(found), len(calls)) == (7, 10)
    assert min(found) >= 0


def test_a_benchmark(
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It leaves nothing behind, and the exit code says whether it is slower than before."""
    monkeypatch.setenv("HPCTRAIN_LAUNCHER", "single")
    where = [f"data.path={digits}", f"output_dir={tmp_path}/runs", "data.prefetch_mb=1"]
    file = tmp_path / "before.json"
    argv = ["experiment=digits", *where, "--steps=5", "--json"]
    assert main([*argv, f"--save={file}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["parts"]) == ["data", "compute", "whole"]
    assert all(each["samples_per_s"] > 0 for each in found["parts"].values())
    assert found["parts"]["data"]["mb_per_s"] > 0
    assert found["limit"]
    assert list((tmp_path / "runs").iterdir()) == []
    # As if it had been a thousand times faster before.
    for each in found["parts"].values():
        each["samples_per_s"] *= 1000
    file.write_text(json.dumps({name: found[name] for name in ("setup", "parts")}))
    assert main([*argv, "--compute-only", f"--against={file}"]) == 9
    (line,) = json.loads(capsys.readouterr().out)["slower"]
    assert line.startswith("compute: ")
    with pytest.raises(ConfigError, match=r"train\.global_batch_size was"):
        main([*argv, "--compute-only", "train.global_batch_size=32", f"--against={file}"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--comm-only"], "one rank sends nothing"),
        (["--steps=2"], "at least 5"),
        (["--tolerance=-1"], "at least 0"),
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
    assert list(found["parts"]) == ["data", "compute", "communication", "whole"]
    assert found["setup"]["ranks"] == 2
    assert list((tmp_path / "runs").iterdir()) == []
