"""Before the first step: can checkpoints be written, and may they be written in the background?

    every rank   writes and syncs a small file      ── space, quota, permissions
    rank 0       renames a folder                   ── some stores cannot
    every rank   the bytes of its part              ── ulimit -f, free space, memory for a copy

If only the first checkpoint shows it, the hours of GPUs until then are lost.
"""

import logging
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.errors import StorageError
from hpctrain.base.files.disk import temporary, why_unwritten
from hpctrain.base.processes.cgroup import memory_left
from hpctrain.base.terminal.terminal import few
from hpctrain.base.units import readable
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.engine.checkpoint.saving.saves import Saves
from hpctrain.engine.distributed import objects

log = logging.getLogger(__name__)

_SHOWN = 3
# Bytes of a rank's part of a checkpoint that are written within about a second, without a copy: a
# state of 286 MiB takes 0.7 s of CPU time, and 1.8 to 5.7 s on a busy disk.
SMALL_PART = 200e6
_OF_FREE = 0.5  # of the free host memory may be such a copy; loaders and caches need the rest


def prove(saves: Saves, ranks: RankInfo, weights: float, part: float) -> None:
    """Write a little, and start writers if saves would stop the training for long.

    All ranks call this together. Given are bytes: the weights that this rank holds, and the part of
    a checkpoint that it will write, which is an estimate, as most optimizers make their state in
    the first step. If no checkpoint can be written, it is a StorageError.
    """
    folder, wrong = saves.folder, _wrong(saves.folder, ranks, weights)
    free = 0 if wrong else shutil.disk_usage(folder).free
    copy = _OF_FREE * memory_left() / ranks.local_world_size
    # of all ranks: what is wrong, what the disk has free, and how much a copy may take
    known = objects.all_gather((wrong, free, weights, part, copy))
    wrongs, frees, every_weights, parts, copies = zip(*known, strict=True)
    several = len(known) > 1
    texts = [f"rank {rank}: " * several + text for rank, text in enumerate(wrongs) if text]
    if texts:
        raise StorageError(f"{folder}: no checkpoint can be written ({few(texts, _SHOWN)})")
    free, whole = min(frees), sum(parts)
    text = f"a checkpoint takes about {readable(whole)}, and {folder} has {readable(free)} free"
    if max(every_weights) > free:
        raise StorageError(f"no checkpoint can be written: {text}")
    if whole > free and ranks.is_main:
        log.warning("the disk is nearly full: %s", text)
    if max(parts) >= SMALL_PART:
        _write_aside(saves, ranks, parts, copies)


def _write_aside(
    saves: Saves, ranks: RankInfo, parts: Sequence[float], copies: Sequence[float]
) -> None:
    """Start writers, unless the copy of a rank takes more memory than it may.

    The copies of a node's ranks may take half of the memory that it has free, or that the job may
    use.
    """
    tight = [pair for pair in zip(parts, copies, strict=True) if pair[0] > pair[1]]
    if not tight:
        saves.start_writers(copies[ranks.rank])
    elif ranks.is_main:
        log.warning(
            "saves stop the training: a copy takes about %s of each rank, of which %s may be used "
            "(half of the node's free memory, for all its ranks)",
            *map(readable, tight[0]),
        )


def _wrong(folder: Path, ranks: RankInfo, weights: float) -> str:
    """Return why this rank cannot write; "" if it can."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and weights > limit * ranks.world_size:
        return f"its file has more bytes than a file may have, {limit:,} (ulimit -f)"
    probe = temporary(folder / "probe")
    try:
        folder.mkdir(exist_ok=True)
        if ranks.is_main:
            probe.mkdir()
            try:
                probe = probe.rename(f"{probe}.tmp")
            finally:
                probe.rmdir()
        return why_unwritten(folder)
    except OSError as error:
        return f"{error.strerror}"
