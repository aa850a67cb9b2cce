"""Runs as arrays of the scheduler: as few as resources and limits allow, each a folder.

    sweeps/2026-01-31_12-00-00/array-0/
        job.sh        what is sent, exactly
        tasks/0 …     links to the run directories, by the number of the array task
        batch/        what the script itself prints
        job_id        the scheduler's number, once it has answered

A run's directory says that it is queued, and by which script, before `sbatch` is called: whatever
happens then, the queue can be asked for the script.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config.frozen import plain
from hpctrain.config.schema import Config
from hpctrain.disk import sync_file_system, write_atomically
from hpctrain.errors import StorageError
from hpctrain.launch import slurm
from hpctrain.launch.queue import Task, me
from hpctrain.launch.script import sbatch_script
from hpctrain.runs import provenance
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.snapshot import Snapshot


@dataclass
class Entry:
    """One run of a sweep, and what becomes of it.

    Attributes:
        overrides: what was typed for it.
        config: typed and checked.
        run: its directory, which need not exist.
        code: what it is to run from; None: the code as it is then.
        keeps_code: that is what it was submitted with before.
        before: its run.json when the sweep began; empty for a new run.
        again: it is finished, and to be done again.
        state: for people.
        job: `ARRAYJOB_TASK`, once it is queued.
        task: its script and number, once it is given to the scheduler.
    """

    overrides: list[str]
    config: Config
    run: RunDir
    code: Snapshot | None = None
    keeps_code: bool = False
    before: dict[str, Any] = field(default_factory=dict)
    again: bool = False
    state: str = ""
    job: str = ""
    task: Task | None = None

    def metric(self) -> float | None:
        """What the run has reached in `config.metric`; None while there is no result."""
        value = (self.run.read().get("result") or {}).get(self.config.metric)
        return None if value is None else float(value)


@dataclass
class Array:
    """Runs that go to the scheduler as one job array.

    Attributes:
        folder: absolute.
        entries: array task i is entry i.
        max_running: tasks at a time; None: no limit of ours.
        after: the array that must have ended before.
        job: the scheduler's number, once it is queued.
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
        """The script."""
        first = self.entries[0]
        return sbatch_script(
            first.config,
            self.folder,
            len(self.entries),
            pythonpath=first.code.pythonpath if first.code else (),
            max_running=self.max_running,
            dependency=f"afterany:{self.after.job}" if self.after and self.after.job else None,
        )

    def write(self, sweep: dict[str, str] | None) -> None:
        """Write the folder, and freeze the runs into their directories as queued.

        Raises:
            StorageError: no permission or no space.
        """
        try:
            (self.folder / "tasks").mkdir(parents=True)
            (self.folder / "batch").mkdir()
            self.script.write_text(self.text())
            for number, entry in enumerate(self.entries):
                entry.task = str(self.script), number
                (self.folder / "tasks" / str(number)).symlink_to(entry.run.path)
            self.freeze(sweep)
        except OSError as error:
            raise StorageError(f"{self.folder}: cannot be written ({error.strerror})") from error

    def freeze(self, sweep: dict[str, str] | None) -> None:
        """Write the run directories: as queued, those that have a task."""
        content, twin = provenance.collect(), None
        for entry in self.entries:
            state, submission = entry.before.get("state", "created"), None
            if entry.task:
                script, number = entry.task
                asked = {"script": script, "task": number, "user": me()}
                state, submission = "queued", {**asked, "time": time.time()}
            entry.run.freeze(
                entry.config,
                sync=False,
                state=state,
                submission=submission,
                code=entry.code.digest if entry.code else None,
                # MLflow shows the runs of a sweep under one parent; a run stays with its first.
                **({"sweep": sweep} if sweep and "sweep" not in entry.before else {}),
            )
            if not entry.keeps_code:
                provenance.store(entry.run.provenance, content, twin)
                twin = twin or entry.run.provenance
        sync_file_system(self.entries[0].run.path)

    def halve(self, folder: Path) -> Array:
        """Keep the first half of the runs; give the other, which is to follow, as an array."""
        middle = (len(self.entries) + 1) // 2
        rest = Array(folder, self.entries[middle:], self.max_running)
        rest.after = self if self.max_running else None
        self.entries = self.entries[:middle]
        for number in range(middle, middle + len(rest.entries)):
            (self.folder / "tasks" / str(number)).unlink()
        self.script.write_text(self.text())
        return rest

    def queued(self, job: str) -> None:
        """Note the scheduler's number."""
        self.job = job
        for number, entry in enumerate(self.entries):
            entry.state, entry.job = "queued", f"{job}_{number}"
        write_atomically(self.folder / "job_id", job + "\n")


def plan(
    entries: Iterable[Entry], folder: Path, max_size: int, here: Iterable[str] = ()
) -> list[Array]:
    """Arrays of runs that ask for the same resources, of at most `max_size` tasks.

    With `launch.max_running` the arrays share that number by their sizes, so that all of them
    together keep to it; where it is smaller than their number they follow one another.

    Args:
        entries: in the order of the sweep, which each array keeps.
        folder: the sweep's; `array-N` are made in it, by `Array.write`.
        max_size: of one array.
        here: job ids of the sweep's arrays that are in the queue: with `launch.max_running` what is
            planned follows them.
    """
    first = 1 + max(map(_number, folder.glob("array-*")), default=-1)
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        config = entry.config
        key = [plain(config.launch), plain(config.site), config.name]
        if config.site.container.runtime is not None:  # these are bound, by the script
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
            array.after = Array(folder, [], job=":".join(sorted(here))) if here else None
        for number in range(limit, len(arrays)):
            arrays[number].after = arrays[number - limit]
    return arrays


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("array-"))


def _shares(sizes: list[int], limit: int) -> list[int]:
    """Split `limit` by sizes, at least 1 each."""
    spare, total = max(0, limit - len(sizes)), sum(sizes)
    return [1 + spare * size // total for size in sizes]


def submit(
    arrays: list[Array], sweep: dict[str, str] | None, inherit: list[int], note: Callable[[], None]
) -> list[Entry]:
    """Give the arrays to the scheduler.

    Args:
        arrays: from `plan`.
        sweep: for the runs' run.json.
        inherit: open files that `sbatch` holds too.
        note: called when runs are written and before they are submitted.

    Returns:
        The entries that the cluster has no room for now; their runs are frozen, not queued.

    Raises:
        LaunchError: the scheduler refuses; what was not queued is as it was before.
        UnreachableError: it does not answer; what it was given stays marked as queued.
    """
    waiting = deque(arrays)
    unused = 1 + max(_number(array.folder) for array in arrays)
    while waiting:
        array = waiting.popleft()
        if not array.folder.exists():
            array.write(sweep)
            note()
        try:
            array.queued(slurm.sbatch(array.script, array.entries[0].config, inherit))
        except slurm.SubmitLimitError:
            if len(array.entries) > 1:
                # How many there is room for is a sum over users, accounts and QOS: trying is surer.
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
