"""Commands on damaged files: an exit code and one sentence, never a traceback, and never a hang."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import run_module
from tests.damage import cases

FAILURE = (
    '{"error": "OSError: gone", "time": 1767225600.0, "host": "node3", "job_id": "17", '
    '"restart_count": 0}'
)
RECORDED = '{"step": 20, "time": 1767225600.0, "metrics": {"val/loss": 0.5}, "checkpoint": ""}'
ASKED = '{"step": 40, "tries": 1, "job_id": "17", "given_up": false}'


@pytest.fixture(scope="module")
def house(
    digits: Path, reference: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One file of each kind that a command reads."""
    folder = tmp_path_factory.mktemp("house")
    runs = folder / "runs"
    trained = reference("train.max_steps=40", "checkpoint.every_steps=20", "train.profile=10-12")
    run_module("hpctrain", "evaluate", str(trained))
    shutil.copytree(trained, runs / trained.name)
    shutil.copytree(trained, runs / "other")
    shutil.copytree(digits, folder / "digits")
    (runs / "doctor").mkdir()
    (runs / "doctor" / "excluded.json").write_text('{"node3": {"time": 1.0, "why": "ECC"}}')
    (runs / "sweeps" / "one").mkdir(parents=True)
    listed = {"run": str(runs / trained.name), "name": trained.name, "swept": ["seed=0"]}
    state = {"job": "17_0", "state": "finished", "overrides": ["experiment=digits", "seed=0"]}
    (runs / "sweeps" / "one" / "sweep.json").write_text(json.dumps([listed | state]))
    for run in (runs / trained.name, runs / "other"):
        (run / "stop").write_text('{"by": "ada", "time": 1767225600.0}')
        (run / "failed").write_text(FAILURE)
        (run / "evaluations" / "recorded").mkdir()
        (run / "evaluations" / "recorded" / "step-00000020.json").write_text(RECORDED)
        (run / "evaluations" / "step-00000040").mkdir()
        (run / "evaluations" / "step-00000040" / "asked.json").write_text(ASKED)
    (folder / "conf" / "hardware").mkdir(parents=True)
    cpu = Path("conf/hardware/cpu.yaml").read_text()
    (folder / "conf" / "hardware" / "own.yaml").write_text(cpu)
    (folder / "hardware.yaml").write_text(cpu)
    return folder


@pytest.mark.parametrize(
    ("seed", "number"), [pytest.param(n, 150, marks=pytest.mark.slow) for n in range(9)]
)
def test_no_command_breaks_or_hangs(
    house: Path, tmp_path: Path, seed: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # nothing reaches the scheduler
    found = [*cases(house, tmp_path, random.Random(seed), number)]
    assert len(found) > number
    assert [f"{name}\n{one.error}" for name, one in found if one.crashed] == []
