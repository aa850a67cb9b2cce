"""Which checkpoint of a run is meant: the newest, that of a step, or the best."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.manifest import checkpoints, damage, newest_intact
from hpctrain.errors import StorageError
from hpctrain.runs.run_dir import RunDir


def chosen_checkpoint(run: RunDir, step: int | None = None, *, best: bool = False) -> Path:
    """Return the folder of an intact checkpoint; its digests are verified.

    Args:
        run: The run directory.
        step: The step of the checkpoint. None means the newest one that is intact.
        best: Take the step that `best` of run.json names, in place of `step`.

    Raises:
        StorageError: There is no such checkpoint, or it is damaged.
    """
    if best:
        known = run.read().get("best")
        if known is None:
            raise StorageError(
                f"{run.path}: the run has no best checkpoint; checkpoint.best=val/loss keeps one"
            )
        step = int(known["step"])
    if step is None:
        checkpoint = newest_intact(run.checkpoints)
    else:
        checkpoint = run.checkpoints / f"step-{step:08d}"
        if checkpoint.is_dir() and (problem := damage(checkpoint)):
            raise StorageError(f"{checkpoint} is not intact: {problem}")
    if checkpoint is None or not checkpoint.is_dir():
        steps = sorted(int(path.name[5:]) for path in checkpoints(run.checkpoints))
        listed = ", ".join(map(str, steps)) or "none"
        which = "no checkpoint" + ("" if step is None else f" of step {step}")
        raise StorageError(f"{run.path}: {which}; there are: {listed}")
    return checkpoint
