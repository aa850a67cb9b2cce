"""The learning rate is scaled with the batch and warmed up by steps, samples or epochs."""

from typing import Any

import pytest
import torch

from hpctrain.config.rules.batch_sizes import BatchSizeRamp
from hpctrain.config.schema import OptimizerConfig, PlateauConfig, SchedulerConfig
from hpctrain.config.validate import validate
from hpctrain.engine.supervised.schedule import Schedule, peak_lr, warmup_steps
from hpctrain.errors import ConfigError


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
        (SchedulerConfig(warmup_epochs=2), 60),
        (SchedulerConfig(warmup_epochs=0.1), 3),
        (SchedulerConfig(warmup_epochs=0.001), 1),
        (SchedulerConfig(warmup_epochs=0.0), 0),
    ],
)
def test_the_warm_up_is_in_steps_samples_or_epochs(config: SchedulerConfig, steps: int) -> None:
    assert warmup_steps(config, BatchSizeRamp((), 64), steps_per_epoch=30) == steps


def test_samples_become_steps_of_a_ramp_and_back() -> None:
    stages = [{"global_batch_size": 16, "steps": 10}, {"global_batch_size": 32, "samples": 100}]
    ramp = BatchSizeRamp.of(64, stages)
    assert ramp.stages == ((16, 10), (32, 4))
    assert [ramp.samples(n) for n in (0, 10, 14, 16)] == [0, 160, 288, 416]
    assert [ramp.steps(n) for n in (0, 1, 160, 161, 288, 289, 416)] == [0, 1, 10, 11, 14, 15, 16]
    assert warmup_steps(SchedulerConfig(warmup_epochs=1), ramp, 5) == ramp.steps(320)


def test_wsd_is_stable_and_then_falls() -> None:
    config = SchedulerConfig("wsd", decay_fraction=0.2, final_ratio=0.1)
    schedule = Schedule(2.0, config, max_steps=100, warmup=10)
    assert schedule(0) == pytest.approx(0.2)
    assert [schedule(step) for step in (9, 50, 80)] == [2.0] * 3
    assert [schedule(step) for step in (90, 100)] == pytest.approx([1.1, 0.2])


def test_one_cycle_is_that_of_torch() -> None:
    config = SchedulerConfig("one_cycle", final_ratio=0.01)
    schedule = Schedule(0.5, config, max_steps=40)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1, momentum=0.9)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 40, final_div_factor=4)
    for step in range(40):
        assert schedule(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12), step
        optimizer.step()
        if step < 39:
            theirs.step()


def test_a_plateau_lowers_the_rate_and_goes_on_from_its_state() -> None:
    config = SchedulerConfig(
        "plateau", final_ratio=0.2, plateau=PlateauConfig(factor=0.5, patience=2)
    )
    schedule = Schedule(1.0, config, max_steps=100, warmup=2)
    rates = []
    for step, loss in enumerate([3, 2, 2, 2, 1, 1, 1, 1, 1]):
        schedule.logged({"val/loss": loss}, step)
        again = Schedule(1.0, config, max_steps=100, warmup=2)
        again.load_state_dict(schedule.state_dict())
        schedule = again
        rates.append(schedule(50))
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2]
    assert schedule(0) == 0.5 * 0.2


def halved(step: int, max_steps: int, by: float = 0.5) -> float:
    """The factor of a user: half of it in the second half of a run."""
    return by if step >= max_steps // 2 else 1.0


def broken(step: int) -> str:
    return "fast"


def own(target: str, **options: Any) -> Schedule:
    return Schedule(0.1, SchedulerConfig(_target_=target, options=options), max_steps=10)


def test_a_schedule_can_be_a_function() -> None:
    assert [own(f"{__name__}.halved")(step) for step in (0, 4, 5)] == [0.1, 0.1, 0.05]
    assert own(f"{__name__}.halved", by=0.25)(9) == 0.025


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        (f"{__name__}.broken", {}, "it returns 'fast' for step 0; it must be a number"),
        ("torch.optim.lr_scheduler.StepLR", {"step_size": 3}, "a function of the step, and"),
    ],
)
def test_what_is_no_schedule_is_refused(target: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own(target, **options)(0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["scheduler=one_cycle"], "scheduler.warmup_steps=20 with scheduler.kind=one_cycle and "),
        (["scheduler._target_=torch.optim.lr_scheduler.StopLR"], "has no 'StopLR'"),
        (["scheduler._target_=torch.optim.lr_scheduler.StepLR"], "scheduler.step_size is missing"),
        (["scheduler=plateau", "scheduler.plateau.metric=val/los"], "did you mean val/loss"),
        (["scheduler=plateau", "scheduler.plateau.factor=1"], "it must be greater than 0 and less"),
    ],
)
def test_a_wrong_schedule_is_refused_before_anything_is_queued(
    composer: Any, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(composer.typed(["experiment=digits", *overrides]), 1)
