"""Tests of which run a directory holds: what may change on resuming."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.frozen import load
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


@pytest.mark.slow  # job/test_out_of_memory.py has a fast one, on two ranks
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
