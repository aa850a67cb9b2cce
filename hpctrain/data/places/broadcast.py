"""Copy shards to every node of a job by Slurm's `sbcast`, which reads the source only once.

    stage = Stage(source, folder)          # every rank: creates the folder on every node
    with long_work("sbcast"):              # every rank
        if rank == 0:
            broadcast(stage.folder, source, shards)
    stage.plan(shards)                     # takes the shards that have arrived, copies the others

The Slurm daemons pass the bytes from node to node in a tree. A file arrives under a temporary name.
A node accepts it as a shard only if its digest is the one in the index, and otherwise copies the
shard itself.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.data.places.depot import BROADCAST, Depot
from hpctrain.data.places.origin import FolderOrigin, WrongShard, digest_of, pour
from hpctrain.data.places.progress_log import Progress
from hpctrain.errors import LaunchError
from hpctrain.forks import run
from hpctrain.shards.index import Shard

log = logging.getLogger(__name__)


def broadcast(folder: Path, source: Path, shards: Sequence[Shard]) -> None:
    """Send shards to all nodes of this job, into `Stage.folder`. Only one process calls this.

    All of them must fit into the budget of every node.
    """
    if "SLURM_JOB_ID" not in os.environ or not shutil.which("sbcast"):
        raise LaunchError("sbcast sends files to the nodes of a Slurm job, and this is none")
    progress = Progress("sbcast", sum(shard.bytes for shard in shards))
    for shard in shards:
        target = folder / f"{digest_of(shard)}{BROADCAST}"
        done = run(["sbcast", "--force", str(source / shard.path), str(target)], text=True)
        if done.returncode:
            raise LaunchError(f"sbcast of {shard.path} to {target} failed: {done.stderr.strip()}")
        progress.add(shard.bytes)


def receive(depot: Depot, shard: Shard) -> bool:
    """Accept a claimed shard that a broadcast has left in the depot; False without a right one."""
    arrived = depot.folder / f"{digest_of(shard)}{BROADCAST}"
    try:
        if arrived.stat().st_size != shard.bytes:
            return False  # perhaps it is still arriving
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
