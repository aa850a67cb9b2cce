"""Job arrays of workers: one task is one worker, whose ranks train one trial after another.

workers/array-0/   job.sh   tasks: …/workers/0, …/workers/1   batch/   job_id
workers/0/         worker.json   logs/
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.disk import write_atomically
from hpctrain.errors import LaunchError, StorageError
from hpctrain.record import Count, Record, read, written
from hpctrain.run_record import RunRecord, Submission
from hpctrain.runs.state.facts import Facts
from hpctrain.search.search_file import SearchFile
from hpctrain.search.trials import Found
from hpctrain.slurm import excluded_hosts, sbatch
from hpctrain.slurm.partition_limit import road
from hpctrain.slurm.queue import Queue, UnreachableError, me, queued, user_name
from hpctrain.slurm.script import sbatch_script

LEFT = "left"
"""The file that a worker leaves when it takes no more trials."""


class WorkerFile(Record, frozen=True):
    """The content of worker.json: the nodes of a worker, and its task; no script without Slurm."""

    width: Count = 1
    script: str = ""
    task: Count = 0

    @classmethod
    def of(cls, worker: Path) -> WorkerFile:
        """Return the content of worker.json of a worker's folder."""
        return read(cls, worker / "worker.json")


def script(file: SearchFile, config: Config, folder: Path, count: int) -> str:
    """Return the text of the batch script for `count` workers with the nodes of `config`."""
    return sbatch_script(
        config,
        folder,
        count,
        pythonpath=[*map(Path, file.pythonpath)],
        max_running=config.launch.max_running,
        command="work",
        exclude=excluded_hosts.avoided(config),
        grace_s=road(config.site, config.launch.chain).grace_s,
    )


def _next_folder(sweep: Path) -> Path:
    """Return the folder of the next array."""
    numbers = itertools.count()
    names = (sweep / "workers" / f"array-{number}" for number in numbers)
    return next(name for name in names if not name.exists())


def short_name(sweep: Path) -> str:
    """Return how `hpctrain status` may be given the folder of a sweep in this working directory."""
    usual = sweep.parent == Path.cwd() / "runs" / "sweeps"
    return sweep.name if usual else shlex.quote(str(sweep))


def new_worker(sweep: Path, note: WorkerFile) -> Path:
    """Make the folder of another worker."""
    folder = sweep / "workers"
    folder.mkdir(exist_ok=True)
    for number in itertools.count():
        worker = folder / str(number)
        try:
            worker.mkdir()
        except FileExistsError:
            continue
        (worker / "logs").mkdir()
        write_atomically(worker / "worker.json", written(note))
        return worker
    raise AssertionError


def live(sweep: Path) -> Counter[int]:
    """Return how many workers of each width are in the queue; no answer is an UnreachableError."""
    queue = queued([me()])
    found: Counter[int] = Counter()
    for worker in _workers(sweep):
        job = queue.get((worker.script, worker.task)) if worker.script else None
        found[worker.width] += job is not None and not job.is_ending
    return found


def in_queue(sweep: Path) -> list[Facts]:
    """Return the workers in the queue, as `cancel` takes runs; no answer is an UnreachableError."""
    user, found = user_name(sweep.stat().st_uid), []
    folders = [file.parent for file in (sweep / "workers").glob("*/worker.json")]
    notes = {folder: WorkerFile.of(folder) for folder in sorted(folders, key=lambda f: int(f.name))}
    queue = queued([user]) if any(note.script for note in notes.values()) else Queue()
    for folder, note in notes.items():
        if job := queue.get((note.script, note.task)):
            at = Submission(script=note.script, task=note.task, user=user)
            state = "running" if job.state == "RUNNING" else "queued"
            record = RunRecord(state=state, submission=at)
            found.append(Facts(folder, record, job_id=job.id, job=job, scheduler=True))
    return found


def local_workers(sweep: Path) -> list[Path]:
    """Return the folders of the workers without Slurm that have not said that they end."""
    folders = [file.parent for file in (sweep / "workers").glob("*/worker.json")]
    return [each for each in folders if not (WorkerFile.of(each).script or (each / LEFT).exists())]


def _workers(sweep: Path) -> list[WorkerFile]:
    """Return the workers that have not said that they end."""
    folders = [file.parent for file in (sweep / "workers").glob("*/worker.json")]
    return [WorkerFile.of(folder) for folder in folders if not (folder / LEFT).exists()]


def _submit(
    sweep: Path,
    file: SearchFile,
    config: Config,
    count: int,
    inherit: Sequence[int],
) -> int:
    """Submit an array of `count` workers; return for how many of them there is room.

    If the cluster's limit of jobs leaves no room for all, there are fewer. A refusal of the
    scheduler is a LaunchError.
    """
    count = min(count, sbatch.max_array_size())
    width = config.launch.node_numbers[0]
    while True:
        folder = _next_folder(sweep)
        job = folder / "job.sh"
        workers: list[Path] = []
        try:
            (folder / "batch").mkdir(parents=True)
            notes = (WorkerFile(width, str(job), task) for task in range(count))
            workers.extend(new_worker(sweep, note) for note in notes)
            job.write_text(script(file, config, folder, count))
            (folder / "tasks").write_bytes(b"".join(os.fsencode(f"{one}\n") for one in workers))
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error
        try:
            array = sbatch.sbatch(job, config, inherit)
            write_atomically(folder / "job_id", f"{array}\n")
            return count
        except LaunchError as error:
            if not isinstance(error, UnreachableError):  # else the job may be queued
                for path in (folder, *workers):
                    shutil.rmtree(path, ignore_errors=True)
            if not isinstance(error, sbatch.SubmitLimitError) or count == 1:
                raise
            count = (count + 1) // 2


def wanted(file: SearchFile, found: Found, width: int) -> int:
    """Return how many workers of a width have something to do now, and may be there at once.

    The nodes of `n_jobs` workers of the first width are the limit, but one worker may always be.
    """
    waiting = [each for each in found.at("promoted") + found.at("waiting") if each.asked]
    todo = sum(found.widths[each.goal - 1] == width for each in waiting)
    if width == found.widths[0]:
        asked = sum(each.asked for each in found.trials)
        todo += found.n_trials - asked
    return min(todo, max(1, file.n_jobs * found.widths[0] // width))


def submit_missing(
    sweep: Path, file: SearchFile, found: Found, config: Config, first: bool = False
) -> dict[int, int]:
    """Submit the workers of each width that are needed now and not there; return their numbers.

    With `first`, at least one worker is there afterwards: whoever has killed all of them may have
    left nothing but paused trials.
    """
    from hpctrain.launch.sweeps.submit_lock import submit_lock  # it imports submitit

    submitted: dict[int, int] = {}
    with submit_lock([Path(config.output_dir)]) as locks:
        there = live(sweep)
        for width in dict.fromkeys(found.widths):
            missing = wanted(file, found, width) - there[width]
            if first and width == found.widths[0] and not there.total():
                missing = max(1, missing)
            if missing > 0:
                own = _widened(config, found, width)
                submitted[width] = _submit(sweep, file, own, missing, locks)
    return submitted


def _widened(config: Config, found: Found, width: int) -> Config:
    """Return the config with the nodes of a width; a search of one width keeps `launch.nodes`."""
    if len({*found.widths}) == 1:
        return config
    return replace(config, launch=replace(config.launch, nodes=width))
