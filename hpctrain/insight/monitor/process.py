"""The monitor: a process that samples the sensors of one node until the training ends.

    rank with local_rank 0 ── starts the process, and ends it by closing its standard input
    every rank             ── writes the UUIDs of the GPUs that it has been given

Its standard input ends with the rank, however the rank ends. It imports neither torch nor mlflow.
"""

import logging
import math
import os
import platform
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from msgspec import json

from hpctrain.base.errors import DamageError
from hpctrain.base.files.disk import text_of, write_atomically
from hpctrain.base.files.record import Count, Record, written
from hpctrain.base.names.run_record import Progress
from hpctrain.base.processes import child
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.config.schema import MonitorConfig
from hpctrain.insight.monitor.cgroup import JobCgroup
from hpctrain.runs.state import stop_request
from hpctrain.tracking import samples

log = logging.getLogger(__name__)

_END_S = 3.0  # the last sample is taken within this time, unless a sensor hangs
_USE = "utilization_percentage"
_CORES = f"cpu_{_USE}"


def _gpu_file(run_dir: Path, node: str, local_rank: int) -> Path:
    """Return the file in which a rank of a node writes the UUIDs of the GPUs that it was given."""
    return samples.folder(run_dir) / f"{node}.{local_rank}.gpus"


class Idle:
    """Finds devices that were idle for a whole window, also after they were busy.

    A device is idle in a sample below `samples.IDLE_PERCENT`; the window has at least 3 samples.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen: dict[str, deque[float]] = {}
        self._told: set[str] = set()

    def restart(self) -> None:
        """Begin the window anew: the run starts up, so that its devices have no work yet."""
        self._seen.clear()

    def add(self, metrics: Mapping[str, float], *, has_gpus: bool = False) -> list[str]:
        """Return the devices that have become idle with this sample, each once until it is busy.

        Without any GPU, the cores of the job are the device. Beside GPUs that do not tell their
        use, as parts of GPUs and those of AMD, busy cores are no sign of work.
        """
        found = (samples.GPU.fullmatch(name) for name in metrics)
        use = {gpu[1]: metrics[gpu[0]] for gpu in found if gpu and gpu[2] == _USE}
        if not (use or has_gpus) and _CORES in metrics:
            use = {"the cores": metrics[_CORES]}
        idle = []
        for device, value in use.items():
            window = self._seen.setdefault(device, deque(maxlen=self._window))
            window.append(value)
            if max(window) >= samples.IDLE_PERCENT:
                self._told.discard(device)
            elif len(window) == self._window and device not in self._told:
                self._told.add(device)
                idle.append(device)
        return idle


class MonitorSettings(Record, frozen=True):
    """What a monitor must know: the config, a process above all ranks of the node, their number."""

    config: MonitorConfig
    pid: Count
    ranks: Count = 1


class _Monitor:
    """Samples one node."""

    def __init__(self, run: Path, job: MonitorSettings) -> None:
        self._run, self._given, config = run, job, job.config
        self._config = config
        self._node = socket.gethostname()
        self._started = time.time()
        self._writer = samples.SampleWriter(samples.folder(self._run) / f"{self._node}.jsonl")
        # A counter of energy begins anew in each attempt; the file has the sum of all of them.
        self._energy = {k: v for k, v in self._writer.last.items() if k.endswith("_energy_joules")}
        window = math.ceil(60 * config.idle_minutes / config.every_s - 1e-6)
        self._idle = Idle(window)
        self._job = JobCgroup(job.pid)
        with suppress(OSError):
            self._open([])

    def run(self) -> None:
        """Sample until standard input ends; the last sample is taken then."""
        due = time.monotonic()
        over = False
        while not over:
            due += self._config.every_s
            over = _ends_within(max(0.0, due - time.monotonic()))
            self._take_gpus()
            try:
                self._sample()
            except OSError as error:  # a full disk costs samples, not the run
                log.warning("a sample is lost: %s", error)
        self._writer.close()

    def _sample(self) -> None:
        metrics = {name: round(value, 3) for name, value in self._sensors.read().items()}
        metrics |= {k: metrics[k] + v for k, v in self._energy.items() if k in metrics}
        self._writer.write(time.time(), metrics=metrics)
        if not self._trains():
            self._idle.restart()
            return
        if idle := self._idle.add(metrics, has_gpus=bool(self._uuids)):
            self._tell(idle)

    def _take_gpus(self) -> None:
        """Open the GPUs that the ranks have named; the ranks of a node do that one by one."""
        ranks = range(self._given.ranks)  # one without a GPU has no file
        named = (text_of(_gpu_file(self._run, self._node, each)).split() for each in ranks)
        uuids = list(dict.fromkeys(chain.from_iterable(named)))
        if uuids != self._uuids:
            self._open(uuids)

    def _open(self, uuids: list[str]) -> None:
        # A rank, which starts this process, imports no sensors.
        from hpctrain.insight.monitor.sensors import Gpus, Sensors

        self._uuids, gpus = uuids, Gpus(uuids)
        self._sensors = Sensors(self._job, gpus)
        self._writer.write(time.time(), facts={"kernel": platform.release(), **gpus.facts})

    def _trains(self) -> bool:
        """Return whether this attempt has made its second step: compiling is over by then."""
        try:
            progress = Progress.of(self._run)
        except DamageError:
            return False
        return progress.time > self._started and progress.step_s is not None

    def _tell(self, idle: list[str]) -> None:
        config = self._config
        text = (
            f"{self._node}: {', '.join(idle)} below {samples.IDLE_PERCENT:g}% for "
            f"{config.idle_minutes:g} minutes"
        )
        log.warning("%s", text)
        write_atomically(samples.folder(self._run) / f"{self._node}.idle", text + "\n")
        if config.idle_action == "stop":
            stop_request.write(self._run, f"{stop_request.IDLE} ({text}; monitor.idle_action=stop)")


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
        # In the place of those of an attempt before, which are another job's GPUs by now.
        file = _gpu_file(run_dir, socket.gethostname(), ranks.local_rank)
        if uuids:
            write_atomically(file, "\n".join(uuids) + "\n", sync=False)
        else:
            file.unlink(missing_ok=True)
    process = _start(config, run_dir, ranks) if ranks.local_rank == 0 else None
    try:
        yield
    finally:
        if process is not None:
            process.end(_END_S)


def _start(config: MonitorConfig, run_dir: Path, ranks: RankInfo) -> child.Child | None:
    # Where the ranks are in no control group of a job, they descend from their launcher.
    above = os.getppid() if ranks.local_world_size > 1 else os.getpid()
    job = MonitorSettings(config, above, max(1, ranks.local_world_size))
    try:
        return child.Child(
            __name__,
            *(str(run_dir), written(job)),
            cwd=run_dir,
            log_file=samples.folder(run_dir) / f"{socket.gethostname()}.log",
            OMP_NUM_THREADS="1",
        )
    except OSError as error:
        log.warning("the sensors of this node are not read: %s", error)
        return None


def _ends_within(seconds: float) -> bool:
    """Wait; return whether the training has closed our standard input meanwhile."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and not os.read(sys.stdin.fileno(), 64):
            return True
    return False


def main(argv: list[str]) -> int:
    """Run the monitor of this node for the run and the job in `argv`."""
    child.begin()
    try:
        _Monitor(Path(argv[0]), json.decode(argv[1], type=MonitorSettings)).run()
    except Exception:
        log.exception("the monitor failed: the run goes on without its samples")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
