"""The learning rate is scaled with the batch and warmed up by steps, samples or epochs."""

import pytest

from hpctrain.config.schema import OptimizerConfig, SchedulerConfig
from hpctrain.training.schedule import Schedule, peak_lr, warmup_steps


@pytest.mark.parametrize(
    ("scaling", "batch", "lr"),
    [
        ("none", 1024, 0.1),
        ("linear", 256, 0.1),
        ("linear", 8192, 3.2),  # Goyal et al. 2017
        ("linear", 64, 0.025),
        ("sqrt", 1024, 0.2),
    ],
)
def test_the_batch_scales_the_learning_rate(scaling: str, batch: int, lr: float) -> None:
    config = OptimizerConfig(lr=0.1, lr_scaling=scaling, base_batch_size=256)
    assert peak_lr(config, batch) == pytest.approx(lr)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (SchedulerConfig(), 0),
        (SchedulerConfig(warmup_steps=7), 7),
        (SchedulerConfig(warmup_samples=640), 10),
        (SchedulerConfig(warmup_samples=641), 11),
        (SchedulerConfig(warmup_samples=0, warmup_steps=3), 3),
        (SchedulerConfig(warmup_epochs=2), 60),
        (SchedulerConfig(warmup_epochs=0.1), 3),
        (SchedulerConfig(warmup_epochs=0.001), 1),
        (SchedulerConfig(warmup_epochs=0.0, warmup_samples=None), 0),
    ],
)
def test_the_warm_up_is_in_steps_samples_or_epochs(config: SchedulerConfig, steps: int) -> None:
    assert warmup_steps(config, batch=64, steps_per_epoch=30) == steps


def test_the_warm_up_ends_at_the_peak() -> None:
    schedule = Schedule(3.2, SchedulerConfig("linear"), max_steps=20, warmup=4)
    rates = [schedule(step) for step in range(21)]
    assert rates[:4] == pytest.approx([0.8, 1.6, 2.4, 3.2])
    assert max(rates) == 3.2
    assert rates[20] == 0
