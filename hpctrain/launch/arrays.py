"""Job arrays: group runs into as few arrays as resources and limits allow, and submit them.

    sweeps/2026-01-31_12-00-00/array-0/
        job.sh        the batch script
        tasks         the run directories, one on each line, in the order of the array tasks;
                      with launch.pack=4 the first four lines are those of the first task
        batch/        output of the batch script itself
        job_id        the array's job id, as soon as sbatch has printed it; those of a chain, in
                      their order, one on each line
    sweeps/2026-01-31_12-00-00/provenance/   each run takes a copy of it over when it starts

Before `sbatch` is called, run.json says that the run is queued, and names the script. If this
process is killed after that, the next one finds the job in the queue by the script's path.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import sync_file_system
from hpctrain.base.secrets import reference
from hpctrain.cluster.slurm import excluded_hosts, sbatch
from hpctrain.cluster.slurm.partition_limit import Road, road
from hpctrain.cluster.slurm.queue import UnreachableError, me
from hpctrain.cluster.slurm.requeue import lead_s
from hpctrain.cluster.slurm.sbatch_options import check_folder
from hpctrain.cluster.slurm.script import JobOrder
from hpctrain.config.frozen import dump, plain
from hpctrain.config.job_request import JobRequest, fitting_nodes
from hpctrain.launch.entry import Entry, Status
from hpctrain.launch.executors import SlurmExecutor
from hpctrain.launch.jobs import RunJob
from hpctrain.runs.code import provenance


@dataclass
class Array:
    """Runs that are submitted as one job array."""

    folder: Path  # absolute
    entries: list[Entry]  # array task i is entry i
    max_running: int | None = None  # how many tasks may run at a time; None means no limit
    after: Array | None = None  # the array that must have ended before this one starts
    links: int = 1  # so many times it is queued: the chain of one run
    job: str = ""  # the job id, as soon as the array is queued; those of a chain, with colons

    @property
    def pack(self) -> int:
        """How many runs share an array task; no task asks for more than there are."""
        return min(self.entries[0].config.launch.pack, len(self.entries))

    @property
    def tasks(self) -> int:
        """The number of array tasks."""
        return math.ceil(len(self.entries) / self.pack)

    @property
    def request(self) -> JobRequest:
        """What each of the jobs asks for."""
        request = JobRequest.of(self.entries[0].config)
        return replace(request, launch=replace(request.launch, pack=self.pack))

    def text(self) -> str:
        """Return the text of the batch script."""
        return self._executor().text()

    def _executor(self) -> SlurmExecutor:
        first = self.entries[0]
        for entry in self.entries:
            check_folder(entry.config.output_dir, entry.run.path)
        request = self.request
        digest = hashlib.sha256(os.fsencode(first.run.path)).hexdigest()[:8]  # of this run alone
        return SlurmExecutor(
            self.folder,
            request,
            len(self.entries),
            links=self.links,
            pythonpath=first.code.pythonpath if first.code else (),
            order=JobOrder(
                self.max_running,
                f"afterany:{self.after.job}" if self.after and self.after.job else None,
                f"{first.run.name}-{digest}" if self.links > 1 else "",
                excluded_hosts.avoided(request),
            ),
            lead_s=max(lead_s(entry.config.launch, entry.run.path) for entry in self.entries),
            grace_s=_road(first).grace_s,
        )

    def write(self, sweep: dict[str, str] | None) -> None:
        """Write the folder of the array, and the run directories with the state "queued"."""
        try:
            self._write_tasks()
            for number, entry in enumerate(self.entries):
                entry.task = str(self.folder / "job.sh"), number // self.pack
            self.freeze(sweep)
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be written ({error.strerror})") from error

    def freeze(self, sweep: dict[str, str] | None) -> None:
        """Write the run directories; runs that have a task get the state "queued"."""
        shared = self.folder.parent / "provenance"  # until a run starts and takes it over
        if self.folder.exists() and not all(entry.keeps_code for entry in self.entries):
            provenance.store(shared, provenance.collect())
        for entry in self.entries:
            state, submission = entry.before.state or "created", None
            if entry.task:
                script, number = entry.task
                state = "queued"
                submission = {"script": script, "task": number, "user": me(), "time": time.time()}
                submission |= {"pack": self.pack} if self.pack > 1 else {}
            entry.run.freeze(
                dump(entry.config),
                sync=False,
                state=state,
                submission=submission,
                code=entry.code.digest if entry.code else None,
                provenance=entry.before.provenance if entry.keeps_code else str(shared),
                overrides=[*entry.earlier, *map(reference, entry.overrides)],
                config_dir=entry.config_dir,
                # MLflow shows the runs of a sweep under one parent; a run keeps its first parent.
                **entry.place_in(sweep),
            )
        sync_file_system(self.entries[0].run.path)

    def halve(self, folder: Path) -> Array:
        """Keep the first half of the runs; return a new array with the other half."""
        middle = (self.tasks + 1) // 2 * self.pack
        rest = Array(folder, self.entries[middle:], self.max_running)
        rest.after = self if self.max_running else None
        self.entries = self.entries[:middle]
        self._write_tasks()
        return rest

    def _write_tasks(self) -> None:
        """Write the script and the list of its run directories."""
        self._executor().write([entry.run.path for entry in self.entries])

    def submit(self, locks: list[int]) -> None:
        """Submit the script; the entries get their jobs."""
        executor = self._executor()
        executor.locks = locks
        metrics = [entry.config.metric for entry in self.entries]
        jobs = executor.map_array(RunJob, [entry.run for entry in self.entries], metrics)
        for entry, job in zip(self.entries, jobs, strict=True):
            entry.mark(Status.QUEUED)
            entry.handle = job
            entry.job, *entry.behind = job.ids
        self.job = ":".join(each.partition("_")[0] for each in jobs[0].ids)


def plan(
    entries: Iterable[Entry], folder: Path, max_size: int, in_queue: Iterable[str] = ()
) -> list[Array]:
    """Group runs that need the same resources into arrays of at most `max_size` tasks.

    Each array keeps their order. `Array.write` creates the folders `array-N` in `folder`. With
    `launch.max_running` the arrays divide that number in proportion to their sizes, so that it
    holds for all arrays together. If there are more arrays than that number, some wait for the end
    of others; and all wait for the end of those in the queue, whose job ids are `in_queue`. A run
    with a chain is an array of its own: a task of an array cannot wait for one task of another.
    Runs that do not fill a job of `launch.pack` runs are one of their own, which asks for less.
    """
    first = 1 + max(map(_number, folder.glob("array-*")), default=-1)
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        config = entry.config
        key = [plain(config.launch), plain(config.site), config.name, fitting_nodes(config)]
        if config.site.container.runtime is not None:  # the script binds these two folders
            key += [config.output_dir, config.data.path]
        groups.setdefault(json.dumps([*key, str(entry.code and entry.code.path)]), []).append(entry)
    arrays: list[Array] = []
    for group in groups.values():
        way, pack = _road(group[0]), group[0].config.launch.pack
        if way.jobs > 1 and pack > 1:
            raise ConfigError(
                f"launch.pack={pack}: {way.why}, and the jobs of a chain are those of one run; "
                "with launch.chain=1 `resume` goes on with runs that were preempted"
            )
        size = 1 if way.jobs > 1 else max_size * pack
        full = len(group) - len(group) % pack
        starts = [*range(0, full, size), *([full] if full < len(group) else [])]
        for start, end in pairwise([*starts, len(group)]):
            name = f"array-{first + len(arrays)}"
            arrays.append(Array(folder / name, group[start:end], links=way.jobs))
    limits = [array.entries[0].config.launch.max_running for array in arrays]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None:
        shares = _shares([array.tasks for array in arrays], limit)
        for array, share in zip(arrays, shares, strict=True):
            array.max_running = share
            array.after = Array(folder, [], job=":".join(sorted(in_queue))) if in_queue else None
        for number in range(limit, len(arrays)):
            arrays[number].after = arrays[number - limit]
    return arrays


def _road(entry: Entry) -> Road:
    return road(entry.config.site, entry.config.launch.chain)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("array-"))


def _shares(sizes: list[int], limit: int) -> list[int]:
    """Divide `limit` in proportion to the sizes; each share is at least 1."""
    spare, total = max(0, limit - len(sizes)), sum(sizes)
    return [1 + spare * size // total for size in sizes]


def submit(
    arrays: list[Array],
    sweep: dict[str, str] | None,
    locks: list[int],
    on_written: Callable[[], None],
) -> list[Entry]:
    """Write the arrays and submit them; return the entries over the cluster's submit limit.

    These are frozen, but not queued, as are those of later arrays if the scheduler does not answer.
    `on_written` is called after the files of an array are written
    and before it is submitted.

    Raises:
        LaunchError: The scheduler refuses an array.
        UnreachableError: The scheduler does not answer; the submitted runs stay marked as queued.
    """
    waiting = deque(arrays)
    unused = 1 + max(_number(array.folder) for array in arrays)
    while waiting:
        array = waiting.popleft()
        if not array.folder.exists():
            array.write(sweep)
            on_written()
        try:
            array.submit(locks)
        except UnreachableError:  # this array may be queued
            _leave(waiting, sweep)
            raise
        except sbatch.SubmitLimitError as error:
            # Each try at a full queue takes minutes.
            if array.tasks > 1 and not isinstance(error, sbatch.FullQueueError):
                # The limit depends on user, account and QOS: try with half of the runs.
                rest = array.halve(array.folder.with_name(f"array-{unused}"))
                for follower in waiting:
                    follower.after = rest if follower.after is array else follower.after
                waiting.extendleft((rest, array))
                unused += 1
                continue
            shutil.rmtree(array.folder)
            return _leave([array, *waiting], sweep)
    return []


def _leave(waiting: Iterable[Array], sweep: dict[str, str] | None) -> list[Entry]:
    """Freeze the runs of arrays that cannot be queued now, for the next command; return them."""
    for array in waiting:
        for entry in array.entries:
            entry.mark(Status.NO_ROOM)
            entry.task = None
        array.freeze(sweep)
    return [entry for array in waiting for entry in array.entries]
