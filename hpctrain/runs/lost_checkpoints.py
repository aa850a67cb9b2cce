"""A run that has made steps, but whose checkpoints are gone, must not start again in silence.

A run that died before its first checkpoint starts again at step 0, and that is right. Here the
record of the run shows that there was a checkpoint:

    attempts in run.json            one has saved and stopped
    journal, progress.json          a step after the first multiple of checkpoint.every_steps

With `train.from_scratch=true` the directory is kept under another name, with its journal, its uid
and so its run in MLflow, and the run starts again as a new one. So a curve in MLflow has one value
for each step, and points that are not yet uploaded can still be.
"""

from __future__ import annotations

import logging

from hpctrain.checkpoint.manifest import checkpoints
from hpctrain.config.schema import CheckpointConfig, Config
from hpctrain.disk import read_json
from hpctrain.errors import StorageError
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.journal import journal_path, last_step

log = logging.getLogger(__name__)


def refuse(config: Config, run: RunDir) -> None:
    """Check that a run with a saved step has a checkpoint.

    Raises:
        StorageError: It has none.
    """
    if step := _saved_step(config.checkpoint, run):
        raise StorageError(
            f"{run.checkpoints} is empty, but the run was at step {step} and has saved: bring its "
            "checkpoints back; or add train.from_scratch=true, which keeps this directory under "
            "another name and starts a new run at step 0"
        )


def may_start_again(config: Config, run: RunDir) -> bool:
    """Return whether the directory must be archived, so that the run can start at step 0.

    Raises:
        StorageError: The checkpoints of the run are gone, and `train.from_scratch` is not set; or
            a process holds the run.
    """
    if not config.train.from_scratch:
        refuse(config, run)
        return False
    step = _saved_step(config.checkpoint, run)
    if not step:
        return False
    with run.lock():
        log.warning(
            "train.from_scratch: %s was at step %d and has no checkpoint: this directory is kept "
            "under another name, with its journal and its run in MLflow, and a new run starts at "
            "step 0",
            *(run.path, step),
        )
    return True


def _saved_step(checkpoint: CheckpointConfig, run: RunDir) -> int:
    """Return the last known step of a run whose checkpoints are gone; 0 if none are."""
    record = run.read()
    if not record.get("attempts") or record["state"] == "finished" or checkpoints(run.checkpoints):
        return 0
    stopped = [
        int(attempt.get("step", 0))
        for attempt in record["attempts"]
        if attempt.get("state") == "interrupted"
    ]
    try:
        progress = int(read_json(run.path / "progress.json")["step"])
    except (OSError, ValueError, LookupError, TypeError):
        progress = 0
    made = max(progress, last_step(journal_path(run.path)))
    # The checkpoint of a step is written before the next step.
    return max([*stopped, made if made > checkpoint.every_steps else 0])
