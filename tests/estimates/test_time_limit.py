"""`launch.time_min=auto`: from a measured run of the same model, or refused with the reason."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.insight.estimates import measured_run as runs
from hpctrain.insight.estimates import time_limit
from hpctrain.insight.estimates.measured_run import MeasuredRun, frozen, measured_run
from hpctrain.launch.freeze import check
from hpctrain.tracking.journal import journal_path

WORDS = ("train.log_every=5", "train.max_steps=44", "tracking.upload=false")


@pytest.fixture
def measured(reference: Callable[..., Path]) -> MeasuredRun:
    runs._candidates.cache_clear()
    found = measured_run(reference(*WORDS))
    assert found is not None
    return found


def config_of(composer: Composer, run: MeasuredRun, *words: str) -> Config:
    own = frozen(run.path)
    where = [f"output_dir={own.output_dir}", f"data.path={own.data.path}"]
    return composer.typed(["experiment=digits", *where, "launch.time_min=auto", *words])


def test_what_a_run_has_measured(measured: MeasuredRun) -> None:
    assert (measured.ranks, measured.parameters) == (1, 85_002)
    assert measured.samples_per_epoch == 22 * 64
    assert measured.steps == 39  # the first five are not counted
    assert 0 < measured.step_s < measured.startup_s
    assert measured.peak_bytes is None


def test_the_limit_of_a_measured_run(measured: MeasuredRun, composer: Composer) -> None:
    config = config_of(composer, measured, "seed=1", "train.max_epochs=100000")
    check(config)
    steps = 22 * 100_000
    duration = time_limit.expected(config)
    assert duration is not None
    assert duration.steps == steps
    assert duration.run == measured
    seconds = measured.startup_s + steps * measured.mean_step_s
    seconds += 100_000 * measured.evaluation_s + (steps // 50 + 1) * measured.checkpoint_s
    assert duration.seconds == pytest.approx(seconds)
    assert config.launch.time_min == pytest.approx(seconds * 1.3 / 60 + 2, abs=1)
    assert measured.path.name in time_limit.note(config)


def test_smaller_batches_of_a_ramp_take_less(measured: MeasuredRun, composer: Composer) -> None:
    def seconds(*words: str) -> tuple[int, float]:
        duration = time_limit.expected(config_of(composer, measured, *words))
        assert duration is not None
        return duration.steps, duration.seconds

    ramp = "train.batch_size_ramp=[{global_batch_size: 32, steps: 100}]"
    long = ("train.max_steps=1000", "train.max_epochs=null", "train.eval_every=1000")
    steps, ramped = seconds(*long, ramp)
    same, whole = seconds(*long)
    assert steps == same == 1000
    assert whole - ramped == pytest.approx(50 * measured.mean_step_s)
    epochs = ("train.max_epochs=100", "train.eval_every=1000")
    assert seconds(*epochs, ramp)[0] == seconds(*epochs)[0] + 50


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model.hidden=[8]"], "has measured this model (at least 20 steps"),
        (["precision=bf16"], "has the same model, but precision.compute is bf16, and there fp32"),
        (["data.repeat=2"], "so the steps of an epoch are unknown"),
    ],
)
def test_refused(measured: MeasuredRun, composer: Composer, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=r"^launch\.time_min=auto: ") as caught:
        check(config_of(composer, measured, *words))
    assert text in str(caught.value)


def test_a_run_without_enough_steps(measured: MeasuredRun, tmp_path: Path) -> None:
    """As if the run had been killed: its journal ends after the second report."""
    run = tmp_path / "run"
    shutil.copytree(measured.path, run)
    journal = journal_path(run)
    lines = journal.read_text().splitlines(keepends=True)
    third = next(i for i, line in enumerate(lines) if '"step":15' in line)
    journal.write_text("".join(lines[:third]))
    assert measured_run(run) is None
