"""Whether a run goes on where its directory says, or starts again at step 0.

A run that died before its first checkpoint starts again at step 0, and that is right. But its
record may show that there was one: an attempt has saved and stopped, or the journal or
progress.json have a step after which the first save must have been over. Such a run must not start
again in silence. One whose code has changed goes on, and says so (`code.trained_code`).

In both cases `train.from_scratch=true` keeps the directory under another name, with its journal,
its uid and so its run in MLflow, and the run starts again as a new one. So a curve in MLflow has
one value for each step, and points that are not yet uploaded can still be.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import StorageError
from hpctrain.base.names.run_record import Progress
from hpctrain.config.schema import CheckpointConfig, TrainConfig
from hpctrain.runs.checkpoints.manifest import OLD, checkpoints
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.journal import journal_path, last_step

log = logging.getLogger(__name__)


def refuse_lost_checkpoints(run: RunDir, checkpoint: CheckpointConfig) -> None:
    """Raise a StorageError if a run with a saved step has no checkpoint."""
    if step := _saved_step(checkpoint, run):
        raise StorageError(
            f"{run.checkpoints} is empty, but the run was at step {step} and has saved: bring its "
            "checkpoints back; or add train.from_scratch=true, which keeps this directory under "
            "another name and starts a new run at step 0"
        )


def may_start_again(
    run: RunDir,
    train: TrainConfig,
    checkpoint: CheckpointConfig,
    folders: Sequence[Path] | None = None,
) -> bool:
    """Return whether the directory must be archived, so that the run can start at step 0.

    A run that has checkpoints of the code as it is goes on: the same command, typed again after a
    preemption, must not throw away what it has trained. The modules are found as `on_disk` of
    `code.trained_code` does. Checkpoints that are gone without `train.from_scratch`, or a process
    that holds the run, are a StorageError.
    """
    if not train.from_scratch:
        refuse_lost_checkpoints(run, checkpoint)
        return False
    if not (why := _why_again(run, checkpoint, folders)):
        return False
    with run.lock():
        log.warning(
            "train.from_scratch: %s %s: this directory is kept under another name, with its "
            "journal and its run in MLflow, and a new run starts at step 0",
            *(run.path, why),
        )
    return True


def _why_again(run: RunDir, checkpoint: CheckpointConfig, folders: Sequence[Path] | None) -> str:
    """Return why a run cannot go on as it was; "" if it can."""
    if step := _saved_step(checkpoint, run):
        return f"was at step {step} and has no checkpoint"
    record = run.read()
    if record.attempt.misfit:
        return "has checkpoints of another model"
    if code := trained_code.changes(run, folders):
        return f"has checkpoints of other code ({code})"
    if trained_code.turning_points(record):
        return "has gone on with other code"
    return ""


def _saved_step(checkpoint: CheckpointConfig, run: RunDir) -> int:
    """Return the last known step of a run whose checkpoints are gone; 0 if none are."""
    record = run.read()
    there = checkpoints(run.checkpoints) or [*run.checkpoints.glob(f"*{OLD}")]
    if not record.attempts or record.state == "finished" or there:
        return 0
    stopped = [
        each.step or 0 for each in record.attempts if each.state in ("interrupted", "paused")
    ]
    journal = journal_path(run.path)
    made = max(Progress.of(run.path).step or 0, last_step(journal) if journal.exists() else 0)
    # A save is written before the next step or, in the background, before the next save begins.
    saved_by = (checkpoint.every_steps or made) * 2
    return max([*stopped, made if made > saved_by else 0])
