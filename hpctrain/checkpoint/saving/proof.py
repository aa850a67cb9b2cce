"""Before the first step: can checkpoints be written, and may they be written in the background?

    every rank   writes and syncs a small file      ── space, quota, permissions
    rank 0       renames a folder                   ── some stores cannot
    every rank   the bytes of its part              ── ulimit -f, free space, memory for a copy

If only the first checkpoint shows it, the hours of GPUs until then are lost.
"""

import logging
import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.cgroup import memory_left
from hpctrain.checkpoint.saving.saves import Saves
from hpctrain.disk import temporary, why_unwritten
from hpctrain.distributed import objects
from hpctrain.errors import StorageError
from hpctrain.estimates.memory_fit import OF_FREE, SMALL_PART
from hpctrain.rendezvous.ranks import RankInfo
from hpctrain.terminal import few
from hpctrain.units import readable

log = logging.getLogger(__name__)

_SHOWN = 3


@dataclass(frozen=True)
class Sizes:
    """Bytes: of the weights that this rank holds, of the part of a checkpoint that it will write.

    The part is an estimate, as most optimizers make their state in the first step. `staging` is
    what this rank may use of the host's memory for a copy.
    """

    weights: float
    part: float
    staging: float


@dataclass(frozen=True)
class _Found:
    """What one rank finds; `memory` is what its node has left for each of its ranks."""

    wrong: str
    weights: float
    part: float
    staging: float
    free: float
    memory: float


def prove(saves: Saves, ranks: RankInfo, sizes: Sizes) -> None:
    """Write a little, and start writers if saves would stop the training for long.

    All ranks call this together. If no checkpoint can be written, it is a StorageError.
    """
    found = [_Found(**each) for each in objects.all_gather(asdict(_found(saves, ranks, sizes)))]
    wrong = [f"rank {rank}: {each.wrong}" for rank, each in enumerate(found) if each.wrong]
    if wrong:
        text = few(wrong, _SHOWN) if len(found) > 1 else found[0].wrong
        raise StorageError(f"{saves.folder}: no checkpoint can be written ({text})")
    whole, free = sum(each.part for each in found), min(each.free for each in found)
    text = f"a checkpoint takes about {readable(whole)}, and {saves.folder} has {readable(free)}"
    if max(each.weights for each in found) > free:
        raise StorageError(f"no checkpoint can be written: {text} free")
    if whole > free and ranks.is_main:
        log.warning("the disk is nearly full: %s free", text)
    largest = max(found, key=lambda each: each.part)
    if largest.part < SMALL_PART or not sizes.staging:
        return
    for each in found:
        few_bytes = min(each.staging, OF_FREE * each.memory)
        if each.part > few_bytes:
            if ranks.is_main:
                log.warning(
                    "saves stop the training: a copy takes about %s of each rank, of which %s may "
                    "be used (checkpoint.staging_gb, and half of the free memory of the node)",
                    *(readable(each.part), readable(few_bytes)),
                )
            return
    saves.start_writers(sizes.staging)


def _found(saves: Saves, ranks: RankInfo, sizes: Sizes) -> _Found:
    wrong = _wrong(saves.folder, ranks, sizes)
    free = 0.0
    if not wrong:
        disk = os.statvfs(saves.folder)
        free = float(disk.f_bavail * disk.f_frsize)
    memory = memory_left() / ranks.local_world_size
    return _Found(wrong, sizes.weights, sizes.part, sizes.staging, free, memory)


def _wrong(folder: Path, ranks: RankInfo, sizes: Sizes) -> str:
    """Return why this rank cannot write; "" if it can."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and sizes.weights > limit * ranks.world_size:
        return f"its file has more bytes than a file may have, {limit:,} (ulimit -f)"
    try:
        folder.mkdir(exist_ok=True)
        if why := why_unwritten(folder):
            return why
        if ranks.is_main:
            probe = temporary(folder / "probe")
            probe.mkdir()
            other = probe.with_name(f"{probe.name}.tmp")
            try:
                probe.rename(other)
            finally:
                (other if other.exists() else probe).rmdir()
    except OSError as error:
        return f"{error.strerror}"
    return ""
