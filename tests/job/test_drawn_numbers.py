"""The same command draws the same numbers, whoever draws them, also after a restart."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Completed, journal_metrics, only_run, run_module

Train = Callable[..., Completed]
Reference = Callable[..., Path]

DRAWING = """\
import os, random, signal, time
import numpy as np
import torch
from hpctrain.engine.layers.plan import Plan
from hpctrain.tasks import Classification
from hpctrain.training import Hook

def of_all():
    return random.random() + random.gauss(0, 1) + np.random.randn() + float(torch.randn(()))

class Net(torch.nn.Linear):
    def __init__(self, **_):
        super().__init__(64, 10)
        self.order = np.random.permutation(64)  # in no checkpoint

    def forward(self, image):
        return super().forward(image.flatten(1).float()[:, self.order] + of_all())

class Stages(torch.nn.Module):
    plan = Plan(blocks="blocks", last=("head",))

    def __init__(self, **_):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.head = torch.nn.Linear(64, 10)

    def forward(self, image):
        image = image.flatten(1)
        for block in self.blocks:
            image = block(image)
        return self.head(image)

class Task(Classification):
    def __init__(self, **options):
        super().__init__(**options)
        self.centre = of_all()

    def sums(self, outputs, batch):
        sums = super().sums(outputs, batch)
        loss, count = sums["loss"]
        return {**sums, "loss": (loss + self.centre * count, count)}

class Shifted:
    random = False

    def __init__(self):
        self.by = of_all()

    def __call__(self, sample, random):
        return sample | {"image": sample["image"].astype(np.float32) + self.by}

class Drawn(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.drawn = of_all()

class Stops(Hook):
    def __init__(self):
        self.drawn = of_all()

    def after_step(self, state):
        state.tracker.log_metrics({"train/drawn": self.drawn}, state.step)
        if state.step == 1:
            of_optimizer = getattr(state.optimizer, "drawn", 0)
            made = self.drawn, of_optimizer
            numbers = *made, random.random(), np.random.rand(), float(torch.rand(()))
            with open("drawn-" + os.environ.get("RANK", "0"), "w") as file:
                print(*numbers, file=file)
        if state.step == 7 and os.path.exists("stops"):
            os.unlink("stops")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # another thread may get the signal, and steps take a millisecond
"""


COMMON = (
    *("train.max_steps=12", "train.eval_every=6", "train.log_every=1", "tracking.upload=false"),
    *("model._target_=drawing.Net", "task._target_=drawing.Task", "monitor.enabled=false"),
    *("data.transforms=[{_target_: drawing.Shifted}]", "hooks=[{_target_: drawing.Stops}]"),
)


@pytest.fixture(autouse=True)
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def test_an_evaluation_of_a_checkpoint_draws_as_that_of_the_training(
    train: Train, tmp_path: Path
) -> None:
    train(*COMMON)
    run = only_run(tmp_path)
    done = run_module("hpctrain", "evaluate", str(run), "--json")
    found = json.loads(done.stdout)["metrics"]["loss"]
    assert found == journal_metrics(run)["val/loss", 12]


@pytest.mark.slow
def test_equal_commands_and_a_resumed_run_draw_equal_numbers(
    train: Train, reference: Reference, tmp_path: Path
) -> None:
    (tmp_path / "stops").touch()
    train(*COMMON, code=143)
    run = only_run(tmp_path)
    assert ("train/loss", 9) not in journal_metrics(run)
    train(*COMMON)
    assert journal_metrics(run) == journal_metrics(reference(*COMMON))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "alike"),
    [
        (("parallel=ddp",), [True, True, False, False, False]),
        # The ranks of a pipeline have the same samples: a task draws the same for them.
        (
            ("parallel.pp=2", "train.accumulate=2", "model._target_=drawing.Stages"),
            [True, True, True, True, False],
        ),
    ],
)
def test_ranks_with_other_samples_draw_other_numbers(
    train: Train, tmp_path: Path, layout: tuple[str, ...], alike: list[bool]
) -> None:
    drawing = "optimizer={_target_: drawing.Drawn, lr: 0.001, weight_decay: 0}"
    train(*COMMON, *layout, drawing, ranks=2)
    first, second = ((tmp_path / f"drawn-{rank}").read_text().split() for rank in range(2))
    assert [one == two for one, two in zip(first, second, strict=True)] == alike
