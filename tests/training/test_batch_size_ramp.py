"""A run whose batch grows goes on after a kill as if nothing had been, at any step of a stage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Completed, journal_metrics, run_json, runs
from tests.training.test_improvement import KILL

Train = Callable[..., Completed]
# The epochs of the digits have 1,415 samples: two stages end in the first one, one in the second.
STAGES = (
    "train.batch_size_ramp=[{global_batch_size: 16, steps: 14}, {global_batch_size: 32, "
    "samples: 640}, {global_batch_size: 96, steps: 10}]"
)
SIZES = [16] * 14 + [32] * 20 + [96] * 10


def metrics(train: Train, folder: Path, every: int) -> list[dict[tuple[str, int], float]]:
    """Return the metrics of a run, and of one that is killed at step 17 and goes on."""
    (folder / "kill.py").write_text(KILL)
    common = (
        *(STAGES, "train.global_batch_size=128", "train.max_epochs=3", "train.log_every=1"),
        *("scheduler.warmup_steps=0", "scheduler.warmup_epochs=0.2"),
        *("tracking.upload=false", "monitor.enabled=false", "+hooks=[{_target_: kill.KillOnce}]"),
        *(f"checkpoint.every_steps={every}", "train.micro_batch_size=4"),
    )
    train(*common, "name=killed", KILL="1", code=9, new=True)
    train(*common, "name=killed", KILL="1")
    train(*common, "name=whole", KILL="")
    found = runs(folder / "runs")
    assert [len(run_json(run)["attempts"]) for run in found] == [2, 1]
    samples = {run_json(run)["result"]["perf/samples_seen"] for run in found}
    assert samples == {14 * 16 + 20 * 32 + 10 * 96 + 128 * (len(_sizes(found[0])) - 44)}
    return [journal_metrics(run) for run in found]


def _sizes(run: Path) -> list[float]:
    found = journal_metrics(run)
    return [
        value for (name, _), value in sorted(found.items()) if name == "train/global_batch_size"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, 14], ids=["in the middle of a stage", "at a border"])
def test_a_killed_ramp_goes_on_exactly(train: Train, tmp_path: Path, every: int) -> None:
    """The checkpoint before the kill is that of step 16, or of step 14."""
    killed, whole = metrics(train, tmp_path, every)
    assert killed == whole
    steps = sorted(step for name, step in whole if name == "train/global_batch_size")
    given = [whole["train/global_batch_size", step] for step in steps]
    assert given == [*SIZES, *[128] * (len(given) - len(SIZES))]
    # An epoch is evaluated at its end, however many steps it has.
    evaluated = sorted(step for name, step in whole if name == "val/loss")
    epochs = [whole["train/epoch", step] for step in evaluated]
    assert epochs == [1, 2, 3]
    assert [whole["train/epoch", step - 1] for step in evaluated] == [0, 1, 2]
    assert len(given) == evaluated[-1], "the run ends with its last epoch"
