"""The ranks in a container, the batch script and Slurm's commands outside.

    batch script ── srun ── apptainer exec --bind … image ── python -m hpctrain run DIR
         │                                                     │
         └── scontrol requeue  ◀── DIR/requeue, a note ────────┘ rank 0, asked to stop, has saved

A container seldom has scontrol, or the key that it needs. The job must be requeued while it runs
and inside the grace time, and rank 0 may still wait for its uploader: so the script looks for the
note while srun runs, and rank 0 goes on when the note is gone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError

log = logging.getLogger(__name__)

REQUEUE_NOTE = "HPCTRAIN_REQUEUE_NOTE"
"""The variable with which the batch script tells rank 0 where a note is read."""

# Slurm's SIGTERM reaches it as well. A job that was cancelled is no longer RUNNING: it stays away.
REQUEUE_ON_NOTE = f"""\
# The container has no scontrol: rank 0 leaves a note, and this shell requeues the job at once.
export {REQUEUE_NOTE}="$run"/requeue
rm -f "${REQUEUE_NOTE}"
(
    trap '' TERM
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        [[ -e ${REQUEUE_NOTE} ]] || continue
        job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
        [[ $(squeue --noheader --jobs="$job" --format=%T) != RUNNING ]] || scontrol requeue "$job"
        rm -f "${REQUEUE_NOTE}"
    done
) &"""


def in_container(config: Config, folders: Iterable[Path]) -> tuple[list[str], list[str]]:
    """What stands between srun and python.

    Args:
        config: its `site.container`; a runtime of None gives nothing.
        folders: what the ranks read and write, at the same path inside.

    Returns:
        Arguments of srun, and the words in front of python's.

    Raises:
        ConfigError: a folder's path cannot be bound.
    """
    container = config.site.container
    if container.runtime is None:
        return [], []
    own = [str(folder) for folder in _outermost(folders)]
    for path in own:
        if bad := [char for char in ",:" if char in path]:
            raise ConfigError(
                f"{path}: {container.runtime} takes the {bad[0]!r} for the end of a path to bind; "
                "choose another output_dir or data.path"
            )
    binds = [*own, *container.binds]
    image = str(container.image)
    if container.runtime == "pyxis":
        mounts = ",".join(bind if ":" in bind else f"{bind}:{bind}" for bind in binds)
        return [f"--container-image={image}", f"--container-mounts={mounts}", *container.args], []
    has_gpus = config.launch.gpus_per_node > 0
    words = [container.runtime, "exec"]
    words += ["--nv"] if (has_gpus if container.nv is None else container.nv) else []
    words += [f"--bind={bind}" for bind in binds]
    return [], [*words, *container.args, image]


def leave_note(note: Path, wait_s: float = 30.0) -> bool:
    """Ask the batch script to requeue this job; False, with the reason logged, if nobody does."""
    try:
        note.touch()
    except OSError as error:
        log.error("%s: cannot be written (%s): not requeued", note, error.strerror)
        return False
    end = time.monotonic() + wait_s
    while note.exists():
        if time.monotonic() > end:
            log.error("%s: the batch script has not read it in %g s: not requeued", note, wait_s)
            return False
        time.sleep(0.2)
    log.info("the batch script was asked to requeue the job; its log says what became of it")
    return True


def note_from_env() -> Path | None:
    """Where to leave a note; None where the scheduler's commands are at hand."""
    return Path(os.environ[REQUEUE_NOTE]) if REQUEUE_NOTE in os.environ else None


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders that are not inside another, once each."""
    unique = dict.fromkeys(folders)
    return [path for path in unique if not any(other in path.parents for other in unique)]
