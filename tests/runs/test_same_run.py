"""Tests of which run a directory holds: what may change on resuming, and older releases."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.frozen import load
from hpctrain.runs.run_dir import RunDir
from tests.conftest import Completed, run_json, run_module, runs

# From its fourth training call on, this model takes at most 32 samples at a time.
GREEDY = """\
import torch

class Net(torch.nn.Linear):
    calls = 0

    def __init__(self, **_):
        super().__init__(64, 10)

    def forward(self, image):
        self.calls += self.training
        if self.training and self.calls > 3 and len(image) > 32:
            raise RuntimeError("out of memory")
        return super().forward(image.flatten(1).float())
"""


@pytest.fixture
def failed(train: Callable[..., Completed], tmp_path: Path) -> Path:
    """A run that ran out of memory in its fourth step and has a checkpoint of its second."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    size = ("train.max_steps=6", "checkpoint.every_steps=2", "train.eval_every=100")
    done = train("model._target_=greedy.Net", *size, "tracking=off", code=1)
    assert "out of memory" in done.stderr
    (run,) = runs(tmp_path / "runs")
    assert [path.name for path in (run / "checkpoints").glob("step-????????")] == ["step-00000002"]
    return run


def test_a_run_out_of_memory_resumes_with_smaller_micro_batches(
    failed: Path, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    def resume(override: str, code: int = 0) -> Completed:
        command = ("resume", failed.name, override)
        return run_module("hpctrain", *command, code=code, cwd=tmp_path, **no_sbatch)

    before = run_json(failed)
    assert "train.accumulate=0: it must be at least 1" in resume("train.accumulate=0", 2).stderr
    assert "use 63 or 66" in resume("train.accumulate=3", 2).stderr
    assert run_json(failed) == before
    resume("train.accumulate=2")
    after = run_json(failed)
    assert (after["state"], after["result"]["step"], after["uid"]) == ("finished", 6, before["uid"])
    assert load(failed / "config.yaml").train.accumulate == 2
    assert runs(tmp_path / "runs") == [failed]


def test_runs_of_older_releases_are_found_by_their_directories(
    failed: Path, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    """Older releases computed the names of the runs differently."""
    old = failed.with_name("digits-0123abcd")
    os.rename(failed, old)
    record = run_json(old) | {"signature": "0123abcd"}
    (old / "run.json").write_text(json.dumps(record))
    assert RunDir.open(old).name == "digits-0123abcd"

    def hpctrain(*arguments: str, code: int = 0) -> Completed:
        return run_module("hpctrain", *arguments, code=code, cwd=tmp_path, **no_sbatch)

    assert "digits-0123abcd" in hpctrain("status").stdout
    other = hpctrain("resume", old.name, "optimizer.lr=0.5", code=2).stderr
    assert "it would be another run" in other
    assert "train.accumulate" in other
    hpctrain("resume", old.name, "train.accumulate=2")
    assert run_json(old)["state"] == "finished"
    assert runs(tmp_path / "runs") == [old]
    assert "finished already" in hpctrain("run", str(old)).stdout
