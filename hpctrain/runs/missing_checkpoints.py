"""A run that cannot go on as it was: its checkpoints are gone, or they are of other code.

A run that died before its first checkpoint starts again at step 0, and that is right. Here the
record of the run shows that there was a checkpoint:

    attempts in run.json            one has saved and stopped
    journal, progress.json          a step after the first multiple of checkpoint.every_steps

Such a run must not start again in silence. One whose code has changed goes on, and says so
(`hpctrain.runs.code.trained_code`).

In each of these cases `train.from_scratch=true` keeps the directory under another name, with its
journal, its uid and so its run in MLflow, and the run starts again as a new one. So a curve in
MLflow has one value for each step, and points that are not yet uploaded can still be.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from hpctrain.checkpoint.files.manifest import checkpoints
from hpctrain.config.schema import CheckpointConfig, Config
from hpctrain.errors import StorageError
from hpctrain.run_record import Progress
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.journal import journal_path, last_step

log = logging.getLogger(__name__)


def refuse(config: Config, run: RunDir) -> None:
    """Raise a StorageError if a run with a saved step has no checkpoint."""
    if step := _saved_step(config.checkpoint, run):
        raise StorageError(
            f"{run.checkpoints} is empty, but the run was at step {step} and has saved: bring its "
            "checkpoints back; or add train.from_scratch=true, which keeps this directory under "
            "another name and starts a new run at step 0"
        )


def may_start_again(config: Config, run: RunDir, folders: Sequence[Path] | None = None) -> bool:
    """Return whether the directory must be archived, so that the run can start at step 0.

    A run that has checkpoints of the code as it is goes on: the same command, typed again after a
    preemption, must not throw away what it has trained. The modules are found as `modules.find`
    does. Checkpoints that are gone without `train.from_scratch`, or a process that holds the run,
    are a StorageError.
    """
    if not config.train.from_scratch:
        refuse(config, run)
        return False
    if not (why := _why_again(config, run, folders)):
        return False
    with run.lock():
        log.warning(
            "train.from_scratch: %s %s: this directory is kept under another name, with its "
            "journal and its run in MLflow, and a new run starts at step 0",
            *(run.path, why),
        )
    return True


def _why_again(config: Config, run: RunDir, folders: Sequence[Path] | None) -> str:
    """Return why a run cannot go on as it was; "" if it can."""
    if step := _saved_step(config.checkpoint, run):
        return f"was at step {step} and has no checkpoint"
    record = run.read()
    if record.attempt.misfit:
        return "has checkpoints of another model"
    if code := trained_code.changes(config, run, folders):
        return f"has checkpoints of other code ({code})"
    if trained_code.turning_points(record):
        return "has gone on with other code"
    return ""


def _saved_step(checkpoint: CheckpointConfig, run: RunDir) -> int:
    """Return the last known step of a run whose checkpoints are gone; 0 if none are."""
    record = run.read()
    if not record.attempts or record.state == "finished" or checkpoints(run.checkpoints):
        return 0
    stopped = [
        each.step or 0 for each in record.attempts if each.state in ("interrupted", "paused")
    ]
    made = max(Progress.of(run.path).step or 0, last_step(journal_path(run.path)))
    # The checkpoint of a step is written before the next step.
    return max([*stopped, made if made > (checkpoint.every_steps or made) else 0])
