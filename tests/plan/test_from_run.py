"""`plan --from-run`: measured times take the place of assumed efficiencies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.estimates.measured_run import measured_run
from hpctrain.plan.plan_command import main
from hpctrain.tracking.journal import journal_path

WORDS = ("train.log_every=5", "train.max_steps=44", "tracking.upload=false")


@pytest.fixture
def run(reference: Callable[..., Path]) -> Path:
    return reference(*WORDS)


def plan(
    capsys: pytest.CaptureFixture[str], digits: Path, runs: list[Path], *words: str
) -> dict[str, Any]:
    given = [word for run in runs for word in ("--from-run", str(run))]
    assert main(["experiment=digits", f"data.path={digits}", *given, *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_run_itself_and_a_larger_one(
    capsys: pytest.CaptureFixture[str], digits: Path, run: Path
) -> None:
    measured = measured_run(run)
    found = plan(capsys, digits, [run])
    (same,) = found["layouts"]
    assert same["step_s"] == pytest.approx(measured.step_s, rel=1e-6)
    assert run.name in found["assumptions"]["measured"]
    assert found["hardware"] == []  # what a CPU has measured says nothing of GPUs
    (more,) = plan(capsys, digits, [run], "train.global_batch_size=128")["layouts"]
    assert 1.1 < more["step_s"] / same["step_s"] < 2.1
    (two,) = plan(capsys, digits, [run], "parallel=ddp", "launch.tasks_per_node=2")["layouts"]
    assert two["step_s"] is None  # no run has measured communication


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model=convnet"], "model._target_ is hpctrain.models.MLP there, and hpctrain.models."),
        (["precision=bf16"], "precision.compute is fp32 there, and bf16 here"),
        (["hardware=h100_sxm"], "it ran on CPU, which is not hardware=h100_sxm"),
        (["launch.cpus_per_task=7"], "a CPU is as fast as its cores"),
    ],
)
def test_a_run_of_something_else(digits: Path, run: Path, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(["experiment=digits", f"data.path={digits}", "--from-run", str(run), *words])
    assert str(caught.value).startswith(f"--from-run {run}")
    assert text in str(caught.value)


def test_what_is_no_run_or_has_too_few_steps(digits: Path, run: Path, tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            main(["experiment=digits", f"data.path={digits}", "--from-run", str(folder)])
        return str(caught.value)

    assert said(tmp_path).startswith(f"--from-run {tmp_path}: no run directory")
    short = tmp_path / "short"
    shutil.copytree(run, short)
    journal = journal_path(short)
    lines = journal.read_bytes().splitlines(keepends=True)
    reports = [i for i, line in enumerate(lines) if b"perf/step_ms_p50" in line]
    journal.write_bytes(b"".join(lines[: reports[1] + 1]))
    told = said(short)
    assert "it has measured 5 steps after its first report, and at least 20" in told
    assert told.endswith("or report more often: train.log_every=5")
