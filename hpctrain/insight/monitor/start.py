"""Start the monitor of a node for the time of the training.

rank with local_rank 0 ── starts the process, and ends it by closing its standard input
every rank             ── writes the UUIDs of the GPUs that it has been given
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import written
from hpctrain.base.processes.child import Child
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import MonitorConfig
from hpctrain.insight.monitor.process import MonitorSettings, gpu_file
from hpctrain.tracking import samples

log = logging.getLogger(__name__)
_END_S = 3.0  # the last sample is taken within this time, unless a sensor hangs


@contextmanager
def monitored(
    config: MonitorConfig, run_dir: Path, ranks: RankInfo, uuids: Sequence[str]
) -> Iterator[None]:
    """Sample the sensors of this node during the context. A failure to do so is only a warning.

    The first rank of each node starts the monitor, for the GPUs of the job that it knows.
    """
    if not config.enabled:
        yield
        return
    with suppress(OSError):
        samples.folder(run_dir).mkdir(exist_ok=True)
        _name_gpus(gpu_file(run_dir, socket.gethostname(), ranks.local_rank), uuids)
    process = _start(config, run_dir, ranks) if ranks.local_rank == 0 else None
    try:
        yield
    finally:
        if process is not None:
            process.end(_END_S)


def _name_gpus(file: Path, uuids: Sequence[str]) -> None:
    """Write the UUIDs of a rank, in the place of those of an attempt before.

    That one may have had other GPUs of this node, which are another job's by now.
    """
    if uuids:
        write_atomically(file, "\n".join(uuids) + "\n", sync=False)
    else:
        file.unlink(missing_ok=True)


def _start(config: MonitorConfig, run_dir: Path, ranks: RankInfo) -> Child | None:
    # Where the ranks are in no control group of a job, they descend from their launcher.
    above = os.getppid() if ranks.local_world_size > 1 else os.getpid()
    job = MonitorSettings(config, above, max(1, ranks.local_world_size))
    try:
        return Child(
            "hpctrain.insight.monitor.process",
            *(str(run_dir), written(job)),
            cwd=run_dir,
            log_file=samples.folder(run_dir) / f"{socket.gethostname()}.log",
            OMP_NUM_THREADS="1",
        )
    except OSError as error:
        log.warning("the sensors of this node are not read: %s", error)
        return None
