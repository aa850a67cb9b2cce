"""Shards to every node of a job by Slurm's `sbcast`: the file system is read once, not per node.

    stage = Stage(source, folder)          # every rank: the folder exists on every node
    if rank == 0:
        broadcast(stage.folder, source, shards)
    barrier()
    stage.plan(shards)                     # what has arrived is checked and taken, the rest copied

The daemons of Slurm pass the bytes on in a tree. What arrives has a temporary name; a node takes
it for a shard only when its digest is the index's, and copies the shard itself otherwise.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.data.index import Shard
from hpctrain.data.places.depot import BROADCAST, Depot
from hpctrain.data.places.origin import FolderOrigin, WrongShard, digest_of, pour
from hpctrain.data.places.progress_log import Progress
from hpctrain.errors import LaunchError

log = logging.getLogger(__name__)


def broadcast(folder: Path, source: Path, shards: Sequence[Shard]) -> None:
    """Send shards to all nodes of this job; one process calls it.

    Args:
        folder: Of the staged shards, the same on each node, where it exists: `Stage.folder`.
        source: Folder of the data set.
        shards: Together within every node's budget; each is sent, also where it lies already.

    Raises:
        LaunchError: This is no Slurm job, or sbcast fails; the message has what it said.
    """
    if "SLURM_JOB_ID" not in os.environ or not shutil.which("sbcast"):
        raise LaunchError("sbcast sends files to the nodes of a Slurm job, and this is none")
    progress = Progress("sbcast", sum(shard.bytes for shard in shards))
    for shard in shards:
        target = folder / f"{digest_of(shard)}{BROADCAST}"
        done = subprocess.run(
            ["sbcast", "--force", str(source / shard.path), str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LaunchError(f"sbcast of {shard.path} to {target} failed: {done.stderr.strip()}")
        progress.add(shard.bytes)


def receive(depot: Depot, shard: Shard) -> bool:
    """Take a claimed shard that a broadcast has left here; False when there is none, or a bad one.

    Raises:
        OSError: It cannot be renamed.
    """
    arrived = depot.folder / f"{digest_of(shard)}{BROADCAST}"
    try:
        if arrived.stat().st_size != shard.bytes:
            return False  # perhaps still on its way
    except FileNotFoundError:
        return False
    try:
        pour(FolderOrigin(depot.folder), replace(shard, path=arrived.name), lambda block: None)
    except WrongShard as error:
        log.warning("%s: what sbcast has brought is not used: %s", shard.path, error)
        arrived.unlink()
        return False
    os.replace(arrived, depot.path(shard))
    return True
