"""Job arrays of workers: one task is one worker, whose ranks train one trial after another.

workers/array-0/   job.sh   tasks: …/workers/0, …/workers/1   batch/   job_id
workers/0/         worker.json   logs/
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import LaunchError, StorageError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.record import Count, Record, read, written
from hpctrain.base.names.run_record import RunRecord, Submission
from hpctrain.cluster.slurm import excluded_hosts, sbatch
from hpctrain.cluster.slurm.partition_limit import road
from hpctrain.cluster.slurm.queue import Queue, UnreachableError, queued, user_name
from hpctrain.cluster.slurm.script import JobOrder
from hpctrain.commands.facts import Facts
from hpctrain.config.job_request import JobRequest
from hpctrain.search.rule import wanted
from hpctrain.search.trials import FoundSearch

if TYPE_CHECKING:
    from hpctrain.launch.executors import SlurmExecutor

LEFT = "left"
"""The file that a worker leaves when it takes no more trials, although its job has not ended."""


class WorkerFile(Record, frozen=True):
    """The content of worker.json: the task of a worker; no script without Slurm."""

    script: str = ""
    task: Count = 0

    @classmethod
    def of(cls, worker: Path) -> WorkerFile:
        """Return the content of worker.json of a worker's folder."""
        return read(cls, worker / "worker.json")


def executor(
    request: JobRequest, folder: Path, count: int, pythonpath: Iterable[str] = ()
) -> SlurmExecutor:
    """Return the executor that submits `count` workers with the nodes that `request` asks for."""
    from hpctrain.launch.executors import SlurmExecutor  # it imports submitit

    return SlurmExecutor(
        folder,
        request,
        count,
        pythonpath=[*map(Path, pythonpath)],
        order=JobOrder(request.launch.max_running, exclude=excluded_hosts.avoided(request)),
        command="work",
        grace_s=road(request.site, request.launch.chain).grace_s,
    )


def new_worker(sweep: Path, note: WorkerFile) -> Path:
    """Make the folder of another worker."""
    worker = _new_folder(sweep)
    (worker / "logs").mkdir()
    write_atomically(worker / "worker.json", written(note))
    return worker


def _new_folder(sweep: Path, kind: str = "") -> Path:
    for number in itertools.count():
        folder = sweep / "workers" / f"{kind}{number}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def in_queue(sweep: Path) -> list[Facts]:
    """Return the workers in the queue, as `cancel` takes runs; no answer is an UnreachableError."""
    user, found, notes = user_name(sweep.stat().st_uid), [], _notes(sweep)
    queue = queued([user]) if any(note.script for note in notes.values()) else Queue()
    for folder, note in notes.items():
        if job := queue.get((note.script, note.task)):
            at = Submission(script=note.script, task=note.task, user=user)
            state = "running" if job.state == "RUNNING" else "queued"
            record = RunRecord(state=state, submission=at)
            found.append(Facts(folder, record, job_id=job.id, job=job, scheduler=True))
    return found


def live(sweep: Path) -> int:
    """Return how many workers may take trials; no answer is an UnreachableError."""
    return sum(
        worker.job is not None and not worker.job.is_ending and not (worker.path / LEFT).exists()
        for worker in in_queue(sweep)
    )


def local_workers(sweep: Path) -> list[Path]:
    """Return the folders of the workers without Slurm that have not said that they end."""
    notes = _notes(sweep).items()
    return [folder for folder, note in notes if not (note.script or (folder / LEFT).exists())]


def _notes(sweep: Path) -> dict[Path, WorkerFile]:
    folders = [file.parent for file in (sweep / "workers").glob("*/worker.json")]
    return {folder: WorkerFile.of(folder) for folder in sorted(folders, key=lambda f: int(f.name))}


def _submit(
    sweep: Path, found: FoundSearch, request: JobRequest, count: int, locks: Sequence[int]
) -> int:
    """Submit an array of workers; return for how many the cluster's limit of jobs leaves room.

    A refusal of the scheduler is a LaunchError.
    """
    count, workers = min(count, sbatch.max_array_size()), list[Path]()
    folder = _new_folder(sweep, "array-")
    array = executor(request, folder, count, found.pythonpath)
    array.locks = locks
    try:
        for task in range(count):
            note = WorkerFile(script=str(array.script), task=task)
            workers.append(new_worker(sweep, note))
        array.write(workers)
        array.queue()
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from error
    except UnreachableError:
        raise  # the job may be queued
    except LaunchError as error:
        for path in (folder, *workers):
            shutil.rmtree(path, ignore_errors=True)
        if count == 1 or not isinstance(error, sbatch.SubmitLimitError):
            raise
        return _submit(sweep, found, request, (count + 1) // 2, locks)
    return count


def submit_missing(
    sweep: Path, found: FoundSearch, request: JobRequest, first: bool = False
) -> int:
    """Submit the workers that are needed now and not there; return their number.

    With `first`, at least one worker is there afterwards: whoever has killed all of them may have
    left nothing but paused trials.
    """
    from hpctrain.launch.sweeps.submission import submit_lock  # it imports submitit

    with submit_lock([Path(request.output_dir)]) as locks:
        there = live(sweep)
        missing = max(wanted(found) - there, int(first and not there))
        return _submit(sweep, found, request, missing, locks) if missing > 0 else 0
