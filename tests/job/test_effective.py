"""The values that follow from config, data and ranks are computed, printed and tracked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.rules.batch_sizes import BatchSizes
from hpctrain.config.rules.degrees import Degrees
from hpctrain.config.schema import Config, OptimizerConfig, SchedulerConfig, TrainConfig
from hpctrain.engine.building.build_steps import report_every
from hpctrain.engine.supervised.schedule import Effective
from tests.conftest import Completed


def test_what_follows_from_batch_and_epochs() -> None:
    config = Config(
        optimizer=OptimizerConfig(lr=0.1, lr_scaling="linear", base_batch_size=256),
        scheduler=SchedulerConfig(warmup_epochs=5),
        train=TrainConfig(global_batch_size=512, accumulate=2, max_epochs=90),
    )
    batch = BatchSizes.of(config.train, config.parallel, Degrees(dp_replicate=8))
    assert (batch.share, batch.micro) == (64, 32)

    def effective() -> Effective:
        sections = config.optimizer, config.scheduler, config.train
        return Effective.of(*sections, batch, 100, (100).__mul__)

    assert str(effective()) == (
        "peak lr 0.2, warm-up 500 of 9000 steps, 100 steps per epoch, global batch 512 = dp 8 x "
        "accumulate 2 x 32 samples"
    )
    config.train.max_steps = 300
    assert effective().max_steps == 300
    config.train.max_epochs = None
    assert effective().max_steps == 300


def test_a_short_run_reports_ten_times() -> None:
    steps = [report_every(TrainConfig(), steps) for steps in (1, 19, 25, 660, 10**6)]
    assert steps == [1, 1, 2, 66, 200]
    assert report_every(TrainConfig(log_every=500), 1000) == 500


OWN = """\
import torch

class Printing(torch.optim.SGD):
    def step(self, closure=None):
        print("rates", *(group["lr"] for group in self.param_groups))
        return super().step(closure)

def groups(params, lr, weight_decay, of_biases):
    matrices = [p for p in params if p.ndim > 1]
    others = [p for p in params if p.ndim < 2]
    given = [{"params": matrices}, {"params": others, "lr": of_biases}]
    return Printing(given, lr=lr, weight_decay=weight_decay)
"""


def test_an_own_optimizer_with_groups_trains_each_with_its_rate(
    train: Callable[..., Completed], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = ("optimizer._target_=own.groups", "+optimizer.options.of_biases=3e-4")
    done = train(
        *(*own, "optimizer.lr=0.003"),
        *("optimizer.lr_scaling=linear", "optimizer.base_batch_size=32", "scheduler=constant"),
        *("scheduler.warmup_steps=2", "train.max_steps=3", "tracking=off"),
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rates")]
    found = [tuple(map(float, rates)) for _, *rates in lines]  # neither a trial nor a save is seen
    # lr_scaling doubles both. Half of them is the first step of the warm-up.
    assert found == [pytest.approx(rates) for rates in ((3e-3, 3e-4), (6e-3, 6e-4), (6e-3, 6e-4))]
