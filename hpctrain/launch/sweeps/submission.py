"""The submission of a sweep's runs, under the submit lock: all that it writes, and takes back.

read run.json, ask the queue ── set_states ── archive, copy the code ── arrays ── sbatch
│                                                                   └── freeze, to run here
└── if Slurm refuses: what was not queued is as it was before
"""

import functools
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hpctrain.base import offered, secrets
from hpctrain.base.errors import ConfigError, LaunchError, StorageError, TrackingError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.lock import file_lock
from hpctrain.base.files.record import written
from hpctrain.base.names.run_record import RunRecord
from hpctrain.base.terminal.console import say
from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.queue import Queue, UnreachableError, queue_of
from hpctrain.config.frozen import executed
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry, Status, set_states
from hpctrain.launch.sweeps.before_queueing import (
    check_bounds,
    check_room,
    copies_of,
    imported_from,
    say_changed,
)
from hpctrain.runs import sweep_overrides, trust
from hpctrain.runs.freeze import check_stores, freeze, restore_config
from hpctrain.runs.start_again import may_start_again

LOCK = ".submit.lock"


@contextmanager
def submit_lock(folders: Iterable[Path]) -> Iterator[list[int]]:
    """Hold the submit locks of these folders, so that no run is submitted twice.

    It yields their file descriptors. A process that inherits them holds the locks until it ends.
    """
    announced: set[Path] = set()

    def waiting(path: Path) -> None:
        if path not in announced:
            announced.add(path)
            say(f"another submission into {path.parent} is under way: waiting for it")
        time.sleep(0.2)

    with ExitStack() as stack:
        held = []
        # Sorted, so that two sweeps over several folders cannot wait for each other. Without links,
        # so that the lock of one folder is not taken twice.
        for folder in sorted({Path(os.path.realpath(folder)) for folder in folders}):
            path = folder / LOCK
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = file_lock(path, functools.partial(waiting, path))
                held.append(stack.enter_context(lock))
            except OSError as error:
                raise StorageError(
                    f"output_dir={folder}: cannot write {path} ({error.strerror})"
                ) from error
        yield held


class Submitter:
    """Submits runs of a sweep, to the cluster or to run here; `folder` is that of the sweep."""

    def __init__(self, folder: Path, entries: Sequence[Entry], *, cluster: bool) -> None:
        self._folder, self._entries, self._cluster = folder, entries, cluster
        self._uid = uuid.uuid4().hex  # of the sweep
        self._locks: list[int] = []
        self._copies: list[Path] = []  # code snapshots that this submission has written
        self._checked = set[str]()  # resources for which the scheduler was asked

    def queue(self, entries: list[Entry]) -> list[Entry]:
        """Submit those that need it; return the ones over the submit limit.

        A refusal of the scheduler is a LaunchError, and what was not queued is restored.
        """
        travels = (
            entry.config
            for entry in entries
            if self._cluster and entry.config.launch.environment == "image"
            if entry.config.launch.rerun == "all" or entry.run.read().state != "finished"
        )
        if (first := next(travels, None)) is not None:
            # It takes a minute the first time, in which others may submit.
            environment = offered.environment
            environment.write(environment.image(first.output_dir), None)
        with submit_lock({entry.run.path.parent for entry in entries}) as self._locks:
            for entry in entries:
                entry.before = entry.run.read()
            try:
                jobs = self._jobs_of(entries)
                for entry in entries:
                    # A job may have ended between the two queries; then run.json says so now.
                    if entry.before.submission:
                        entry.before = entry.run.read()
                todo = self.look(entries, jobs)
                for entry in todo:
                    trust.check(
                        entry.run.path,
                        executed(entry.config),
                        entry.code.path if entry.code else None,
                    )
                check_stores(entry.config.tracking for entry in todo)
            except (ConfigError, LaunchError, TrackingError):
                self.discard()
                raise
            in_queue = {job.id.partition("_")[0] for job in jobs.values()}
            own = (job for entry in self._entries for job in (entry.job, *entry.behind))
            in_queue &= {job.partition("_")[0] for job in own}
            for entry in entries:
                if entry.status is Status.DONE:
                    restore_config(entry.config, entry.run)
            return self._start(todo, in_queue) if todo else []

    def look(self, entries: list[Entry], jobs: Queue) -> list[Entry]:
        """Set the states by what was read and the queue; return what may be submitted.

        Jobs beyond the bounds, and those that the scheduler would not run, are errors.
        """
        set_states(entries, jobs)
        if entries is self._entries:  # else it was said, and these were over the limit
            say_changed(entries)
        if todo := [entry for entry in entries if entry.status is Status.OPEN]:
            check_bounds([(e.config, 1) for e in self._entries if e.job or e.status is Status.OPEN])
            if self._cluster:
                check_room(todo, self._folder, self._checked)
        return todo

    def _jobs_of(self, entries: list[Entry]) -> Queue:
        """Return the queue; runs that shall run here may have jobs of earlier submissions in it."""
        if not self._cluster and not (
            sbatch.available() and any(entry.before.submission for entry in entries)
        ):
            return Queue()
        try:
            return queue_of(entry.before for entry in entries)
        except UnreachableError as error:
            if not self._cluster:
                say(f"{error}: whether jobs of these runs wait is not known", style="yellow")
                return Queue()
            raise

    def _start(self, todo: list[Entry], in_queue: set[str]) -> list[Entry]:
        """Freeze runs, submit them to the cluster, if any; return those that had to wait."""
        archived: dict[Path, Path] = {}
        try:
            self._copies += [code.path for code in copies_of(todo) if code.write()]
            for entry in todo:
                sections = entry.config.train, entry.config.checkpoint
                if entry.again or may_start_again(entry.run, *sections, imported_from(entry)):
                    archived[entry.run.path] = entry.run.archive()
                    # A new directory has no provenance yet, also if it keeps the code.
                    entry.before, entry.again, entry.keeps_code = RunRecord(), False, False
            parent = self._parent()
            if self._cluster and todo:
                planned = arrays.plan(todo, self._folder, sbatch.max_array_size(), in_queue)
                return arrays.submit(planned, parent, self._locks, self.write_list)
            for entry in todo:
                freeze(entry.config, entry.run, entry.overrides, entry.config_dir)
                entry.mark(Status.FROZEN)
                code = entry.code.digest if entry.code else None
                entry.run.update(code=code, **entry.place_in(parent))
            return []
        except UnreachableError:
            raise
        except (LaunchError, StorageError):
            # Runs that were not queued are restored; runs that were queued stay in the list.
            for entry in todo:
                _withdraw(entry, archived.get(entry.run.path))
            self.discard()
            raise
        finally:
            # If the disk is full, the links in the folder still show which runs there are.
            with suppress(OSError):
                if self._folder.exists() and self._cluster:
                    self.write_list()

    def _parent(self) -> dict[str, str] | None:
        """Return uid, name and folder of the parent in MLflow; None for one run."""
        if len(self._entries) < 2:
            return None
        values = sweep_overrides.span(entry.swept for entry in self._entries)
        name = f"sweep {self._folder.name} {values}".strip()
        return {"uid": self._uid, "name": name, "folder": str(self._folder)}

    def discard(self) -> None:
        """If nothing was queued, delete the new code snapshots and all empty folders."""
        if any(entry.job for entry in self._entries):
            return
        for path in (*self._copies, self._folder):
            shutil.rmtree(path, ignore_errors=True)
        folders = {entry.run.path.parent for entry in self._entries}
        empty = [self._folder.parent, *(folder / "code" for folder in folders), *folders]
        for folder in dict.fromkeys([*empty, self._folder.parent.parent]):
            with suppress(OSError):
                if self._locks and os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
                folder.rmdir()

    def write_list(self) -> None:
        """Write sweep.json: the runs, what became of them, and what distinguishes them."""
        known = secrets.known()
        content = [entry.listed(known) for entry in self._entries]
        write_atomically(self._folder / "sweep.json", written(content))


def _withdraw(entry: Entry, archived: Path | None) -> None:
    """Restore a run that was not queued; `archived` is the finished run that it replaced."""
    if entry.job:
        return
    if entry.task and entry.before.state:
        # If this fails: the run is not in the queue, so its state "queued" has no effect.
        with suppress(OSError):
            entry.run.update(state=entry.before.state, submission=None)
    elif entry.task:
        shutil.rmtree(entry.run.path, ignore_errors=True)
    if archived is not None:
        archived.rename(entry.run.path)
