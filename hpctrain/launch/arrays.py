"""Job arrays: group runs into as few arrays as resources and limits allow, and submit them.

    sweeps/2026-01-31_12-00-00/array-0/
        job.sh        the batch script
        tasks         the run directories, one on each line, in the order of the array tasks
        batch/        output of the batch script itself
        job_id        the array's job id, as soon as sbatch has printed it
    sweeps/2026-01-31_12-00-00/provenance/   each run takes a copy of it over when it starts

Before `sbatch` is called, run.json says that the run is queued, and names the script. If this
process is killed after that, the next one finds the job in the queue by the script's path.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import plain
from hpctrain.config.rank_counts import fitting_nodes
from hpctrain.config.schema import Config
from hpctrain.disk import sync_file_system, write_atomically
from hpctrain.errors import StorageError
from hpctrain.launch.executor import Executor
from hpctrain.launch.jobs import LocalRunJob, RunJob
from hpctrain.launch.slurm import sbatch
from hpctrain.launch.slurm.queue import Task, me
from hpctrain.launch.slurm.sbatch_options import check_folder
from hpctrain.launch.slurm.script import sbatch_script
from hpctrain.run_record import RunRecord
from hpctrain.runs import excluded_hosts
from hpctrain.runs.code import provenance
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.secrets import reference


@dataclass
class Entry:
    """One run of a sweep.

    Attributes:
        overrides: The overrides of the command line for this run.
        config: The typed and checked config.
        run: The run directory, which need not exist yet.
        code: The code snapshot that the run uses. None means the code as it is when the job starts.
        keeps_code: Whether `code` is the snapshot of an earlier submission of the same run.
        earlier: The overrides of the command that had made the run, to which `resume` adds some.
        swept: The overrides that distinguish the run from the others of its sweep.
        before: The content of run.json when the sweep began; empty for a new run.
        again: Whether the run is finished and shall be repeated.
        replaces: The waiting job of the run that shall be cancelled first (launch.rerun=queued).
        state: The state, in words for the user.
        job: `ARRAYJOB_TASK`, as soon as the run is queued.
        task: The path of its script and its task number, as soon as these are written.
        handle: The job of submitit, if this process has submitted it.
    """

    overrides: list[str]
    config: Config
    run: RunDir
    code: Snapshot | None = None
    keeps_code: bool = False
    earlier: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    before: RunRecord = field(default_factory=RunRecord)
    again: bool = False
    replaces: str = ""
    state: str = ""
    job: str = ""
    task: Task | None = None
    handle: RunJob | LocalRunJob | None = None

    def place_in(self, sweep: dict[str, str] | None) -> dict[str, Any]:
        """Return what run.json has to note of the sweep; a run keeps its first one.

        Args:
            sweep: Uid and name of the parent run in MLflow; None for a single run.
        """
        if sweep is None or self.before.sweep is not None:
            return {}
        return {"sweep": sweep, **({"swept": self.swept} if self.swept else {})}

    def metric(self) -> float | None:
        """Return the value of the metric `config.metric`; None while there is no result."""
        value = (self.run.read().result or {}).get(self.config.metric)
        return None if value is None else float(value)


@dataclass
class Array:
    """Runs that are submitted as one job array.

    Attributes:
        folder: The absolute path of the array's folder.
        entries: The runs. Array task i is entry i.
        max_running: How many tasks may run at a time; None means no limit.
        after: The array that must have ended before this one starts.
        job: The job id, as soon as the array is queued.
    """

    folder: Path
    entries: list[Entry]
    max_running: int | None = None
    after: Array | None = None
    job: str = ""

    @property
    def script(self) -> Path:  # noqa: D102
        return self.folder / "job.sh"

    def text(self) -> str:
        """Return the text of the batch script."""
        first = self.entries[0]
        for entry in self.entries:
            check_folder(entry.config.output_dir, entry.run.path)
        return sbatch_script(
            first.config,
            self.folder,
            len(self.entries),
            pythonpath=first.code.pythonpath if first.code else (),
            max_running=self.max_running,
            dependency=f"afterany:{self.after.job}" if self.after and self.after.job else None,
            exclude=sorted(excluded_hosts.read(first.config.output_dir)),
        )

    def write(self, sweep: dict[str, str] | None) -> None:
        """Write the folder of the array, and the run directories with the state "queued".

        Args:
            sweep: Uid and name of the parent run in MLflow, for run.json.

        Raises:
            StorageError: There is no permission or no space.
        """
        try:
            (self.folder / "batch").mkdir(parents=True)
            self._write_tasks()
            for number, entry in enumerate(self.entries):
                entry.task = str(self.script), number
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
            entry.run.freeze(
                entry.config,
                sync=False,
                state=state,
                submission=submission,
                code=entry.code.digest if entry.code else None,
                provenance=entry.before.provenance if entry.keeps_code else str(shared),
                overrides=[*entry.earlier, *map(reference, entry.overrides)],
                # MLflow shows the runs of a sweep under one parent; a run keeps its first parent.
                **entry.place_in(sweep),
            )
        sync_file_system(self.entries[0].run.path)

    def halve(self, folder: Path) -> Array:
        """Keep the first half of the runs; return a new array with the other half."""
        middle = (len(self.entries) + 1) // 2
        rest = Array(folder, self.entries[middle:], self.max_running)
        rest.after = self if self.max_running else None
        self.entries = self.entries[:middle]
        self._write_tasks()
        return rest

    def _write_tasks(self) -> None:
        """Write the script and the list of its run directories."""
        self.script.write_text(self.text())
        paths = "".join(f"{entry.run.path}\n" for entry in self.entries)
        (self.folder / "tasks").write_bytes(os.fsencode(paths))

    def submit(self, inherit: list[int]) -> None:
        """Submit the script; store the jobs in the entries and the job id in the file `job_id`.

        Args:
            inherit: File descriptors that `sbatch` inherits.
        """
        executor = Executor(self.script, self.entries[0].config, inherit)
        jobs = executor.submit_runs([(entry.run, entry.config.metric) for entry in self.entries])
        for entry, job in zip(self.entries, jobs, strict=True):
            entry.state, entry.job, entry.handle = "queued", job.job_id, job
        self.job = jobs[0].job_id.partition("_")[0]
        write_atomically(self.folder / "job_id", self.job + "\n")


def plan(
    entries: Iterable[Entry], folder: Path, max_size: int, in_queue: Iterable[str] = ()
) -> list[Array]:
    """Group runs that need the same resources into arrays.

    With `launch.max_running` the arrays divide that number in proportion to their sizes, so that
    it holds for all arrays together. If there are more arrays than that number, some arrays wait
    for the end of others.

    Args:
        entries: The runs. Each array keeps their order.
        folder: The folder of the sweep. `Array.write` creates the folders `array-N` in it.
        max_size: The largest number of tasks of one array.
        in_queue: Job ids of arrays of this sweep that are in the queue. With `launch.max_running`
            the new arrays wait for the end of these.
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
        for start in range(0, len(group), max_size):
            number = first + len(arrays)
            arrays.append(Array(folder / f"array-{number}", group[start : start + max_size]))
    limits = [array.entries[0].config.launch.max_running for array in arrays]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is not None:
        for array, share in zip(
            arrays, _shares([len(a.entries) for a in arrays], limit), strict=True
        ):
            array.max_running = share
            array.after = Array(folder, [], job=":".join(sorted(in_queue))) if in_queue else None
        for number in range(limit, len(arrays)):
            arrays[number].after = arrays[number - limit]
    return arrays


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("array-"))


def _shares(sizes: list[int], limit: int) -> list[int]:
    """Divide `limit` in proportion to the sizes; each share is at least 1."""
    spare, total = max(0, limit - len(sizes)), sum(sizes)
    return [1 + spare * size // total for size in sizes]


def submit(
    arrays: list[Array],
    sweep: dict[str, str] | None,
    inherit: list[int],
    on_written: Callable[[], None],
) -> list[Entry]:
    """Write the arrays and submit them.

    Args:
        arrays: The arrays from `plan`.
        sweep: Uid and name of the parent run in MLflow, for run.json.
        inherit: File descriptors that `sbatch` inherits.
        on_written: Called after the files of an array are written and before it is submitted.

    Returns:
        The entries that are over the cluster's submit limit. They are frozen, but not queued.

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
            array.submit(inherit)
        except sbatch.SubmitLimitError:
            if len(array.entries) > 1:
                # The limit depends on user, account and QOS: try with half of the runs.
                rest = array.halve(array.folder.with_name(f"array-{unused}"))
                for follower in waiting:
                    follower.after = rest if follower.after is array else follower.after
                waiting.extendleft((rest, array))
                unused += 1
                continue
            shutil.rmtree(array.folder)
            for each in (array, *waiting):
                for entry in each.entries:
                    entry.state, entry.task = "no room yet", None
                each.freeze(sweep)
            return [entry for each in (array, *waiting) for entry in each.entries]
    return []
