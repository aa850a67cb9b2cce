"""A stop request while workers read ahead: nothing that blocks stands between it and the save."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.base.names.step_names import step_of
from hpctrain.runs.checkpoints.manifest import checkpoints
from tests.conftest import Completed, runs

# After three batches the transform blocks until the file `go` is there, which nobody makes.
CODE = """\
import gc, os, signal, time
from hpctrain.engine.faults.stop import Stop
from hpctrain.tasks.classification import Classification

class Blocks:
    random = False
    samples = 0

    def __call__(self, sample, random):
        self.samples += 1
        while self.samples > 3 * 64 and not os.path.exists("go"):
            time.sleep(0.05)
        return sample

class Stopped(Classification):
    steps = 0

    def __call__(self, model, batch):
        self.steps += 1
        if self.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            stop = next(x for x in gc.get_objects() if isinstance(x, Stop))
            while not stop.asked:  # its thread sees the signal
                time.sleep(0.01)
        return super().__call__(model, batch)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [True, False])
def test_blocked_transforms(train: Callable[..., Completed], tmp_path: Path, stopped: bool) -> None:
    """The run saves and ends, while the batches that were read ahead never come."""
    (tmp_path / "blocking.py").write_text(CODE)
    task = ["task._target_=blocking.Stopped"] if stopped else []
    train(
        "data.transforms=[{_target_: blocking.Blocks}]",
        "data.val_transforms=[]",
        "data.workers=1",
        "tracking.upload=false",
        "checkpoint.every_steps=1000",
        "train.max_epochs=null",
        f"train.max_steps={3 if not stopped else 100}",
        *task,
        code=143 if stopped else 0,
    )
    (run,) = runs(tmp_path / "runs")
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert attempt["state"] == ("interrupted" if stopped else "finished")
    assert [step_of(path) for path in checkpoints(run / "checkpoints")] == [2 if stopped else 3]
