"""Ranks in a container, while the batch script and Slurm's commands are outside of it.

    batch script ── srun ── apptainer exec --bind … image ── python -m hpctrain run DIR
         │                                                     │
         └── scontrol requeue  ◀── the file DIR/requeue ───────┘ rank 0, after it has saved

Most containers have neither scontrol nor the munge key that it needs. So rank 0 writes the file
`requeue`, the requeue note, when the job shall be requeued. The batch script looks for the note
while srun runs: the job must be requeued while it runs and before the grace time is over, and rank
0 may still wait for its uploader. The script deletes the note, and rank 0 waits for that. The note
names the hosts that the job shall avoid, if it leaves a node that did not pass a check.
"""

import logging
import os
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from hpctrain.base.errors import ConfigError
from hpctrain.base.files.disk import write_atomically
from hpctrain.config.schema import ContainerConfig

log = logging.getLogger(__name__)

REQUEUE_NOTE = "HPCTRAIN_REQUEUE_NOTE"
"""The environment variable in which the batch script tells rank 0 the path of the requeue note."""

GPUS = "$container_gpus"
"""The word of a command by which the container sees the node's GPUs; `CHOOSE_GPUS` sets it."""

CHOOSE_GPUS = """\
# Nodes with GPUs of AMD only need another option than those with GPUs of NVIDIA.
container_gpus=--nv
if [[ -e /dev/kfd && ! -e /proc/driver/nvidia/version ]]; then container_gpus=--rocm; fi"""


def shell_words(words: Iterable[str]) -> str:
    """Return the words of a command for the script, which has chosen the option for the GPUs."""
    return " ".join(f'"{GPUS}"' if word == GPUS else shlex.quote(word) for word in words)


def in_container(
    container: ContainerConfig, folders: Iterable[Path], *, has_gpus: bool
) -> tuple[list[str], list[str]]:
    """Return options of srun, and the words before python, that start the ranks in the container.

    Both are empty without a `runtime`. `shell_words` quotes the words. The folders, which the ranks
    read and write, have the same path in the container; one that cannot be bound is a ConfigError.
    """
    if container.runtime is None:
        return [], []
    if container.runtime == "command":
        return [], container.args
    if container.runtime == "pyxis" and container.image is None:
        return container.args, []
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
    words = [container.runtime, "exec"]
    words += [GPUS] if has_gpus else []
    words += [f"--bind={bind}" for bind in binds]
    return [], [*words, *container.args, image]


def leave_note(note: Path, exclude: str = "", wait_s: float = 30.0) -> bool:
    """Ask the batch script to requeue this job; return whether it has deleted the note in time.

    `exclude` are the hosts that the job shall avoid, as Slurm writes them; "" changes nothing. The
    reason of a failure is logged.
    """
    try:
        write_atomically(note, exclude, sync=False)
    except OSError as error:
        log.error("%s: cannot be written (%s): not requeued", note, error.strerror)
        return False
    end = time.monotonic() + wait_s
    while note.exists():
        if time.monotonic() > end:
            log.error("%s: the batch script has not read it in %g s: not requeued", note, wait_s)
            return False
        time.sleep(0.2)
    log.info("the batch script was asked to requeue the job; its log has the result")
    return True


def note_from_env() -> Path | None:
    """Return the path of the requeue note; None outside a container."""
    return Path(os.environ[REQUEUE_NOTE]) if REQUEUE_NOTE in os.environ else None


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the distinct folders that are not inside another of them."""
    unique = dict.fromkeys(folders)
    return [path for path in unique if not any(other in path.parents for other in unique)]
