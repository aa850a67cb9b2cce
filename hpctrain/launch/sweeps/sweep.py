"""A sweep: runs that are checked together, frozen and submitted. They run without this process.

add() each run ── check all ── skip runs that are finished or under way ── freeze ── sbatch arrays
│                              └── under the submit lock ────────────────────────┘   or submitit's
└── if any is wrong: nothing is written or queued                                    local executor
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hpctrain import secrets
from hpctrain.config.network_variables import variables
from hpctrain.config.schema import Config
from hpctrain.disk import write_atomically
from hpctrain.errors import (
    ConfigError,
    HpctrainError,
    LaunchError,
    OfflineError,
    StorageError,
    TrackingError,
)
from hpctrain.launch import arrays, local_runs
from hpctrain.launch.arrays import Entry
from hpctrain.launch.jobs import LocalRunJob, RunJob, outcome
from hpctrain.launch.output import runs, say, show
from hpctrain.launch.sweeps import wait
from hpctrain.launch.sweeps.before_queueing import Room, imported_from, notes, say_changed_code
from hpctrain.launch.sweeps.code_copies import Copies
from hpctrain.launch.sweeps.queued_changes import say_changes
from hpctrain.launch.sweeps.resource_sweep import name_apart
from hpctrain.launch.sweeps.run_state import replace_waiting, set_states
from hpctrain.launch.sweeps.submit_lock import LOCK, submit_lock
from hpctrain.launch.sweeps.sweep_parent import adopt
from hpctrain.launch.sweeps.unmatched import unmatched
from hpctrain.run_record import RunRecord
from hpctrain.runs import sweep_overrides, trust
from hpctrain.runs.freeze import check, freeze
from hpctrain.runs.missing_checkpoints import may_start_again
from hpctrain.slurm import sbatch
from hpctrain.slurm.queue import Queue, UnreachableError, queue_of
from hpctrain.tracking import store
from hpctrain.tracking.page.links import experiment_page
from hpctrain.tracking.pending_upload import left_behind

_WHERE = {
    True: "sbatch is on the PATH, submitting to Slurm",
    False: "sbatch is not on the PATH, running here, one after the other, with submitit's local "
    "executor",
}
_HERE = "hydra/launcher=submitit_local, running here, one after the other"
_USUAL_ARRAY = 1000  # tasks: that of `max_array_size` where nothing else is set


class Sweep:
    """The runs of one command.

    Hydra has created `folder` and written multirun.yaml in it.

    Args:
        parent: Uid and name of the parent run in MLflow, and the keys that a search varies,
            separated by spaces. None means that a new parent is made if there are several runs.
        local: Whether the runs run on this machine, even if sbatch is on the PATH.
        followed: Whether the caller waits for the jobs, and tells the user about them.
    """

    def __init__(
        self,
        folder: Path,
        parent: dict[str, str] | None = None,
        local: bool = False,
        followed: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self._uid = uuid.uuid4().hex
        self.parent, self._local = dict(parent) if parent else None, local
        self._followed = followed
        self._searched = self.parent.pop("keys", "").split() if self.parent else []
        self.entries: list[Entry] = []
        self._wrong: list[tuple[list[str], HpctrainError]] = []
        self._locks: list[int] = []
        self._answers = True  # Slurm's controller, as far as known
        self._copies, self._room = Copies(), Room(self.folder)

    def add(self, overrides: list[str], compose: Callable[[list[str]], Config]) -> None:
        """Compose and check one run. An error is kept, and raised by `submit`."""
        try:
            config = compose(overrides)
            self.entries.append(Entry(overrides, config, check(config)))
        except HpctrainError as error:
            self._wrong.append((overrides, error))

    def submit(self) -> list[float | Exception | None]:
        """Submit the runs that are neither finished nor under way; return an item per run.

        If this method has waited for the runs (`launch.wait=true`, or no cluster), it is the metric
        or an error; otherwise None. If a run is wrong, nothing was queued; a refusal of the
        scheduler, or more runs than the submit limit allows, is a LaunchError.
        """
        cluster = sbatch.available() and not self._local
        try:
            self._refuse_wrong()
            self._refuse_unmatched()
            name_apart(self.entries)
            self._note_swept_values()
            self._copies.take(self.entries)
            scripts = self._scripts(cluster)
            if self._any("dry_run"):
                self._look(cluster)
        except HpctrainError:
            self._discard()
            raise
        if self._any("dry_run"):
            self._say_notes(cluster and self._answers)
            show(self.entries)
            print("\n".join(scripts), end="")
            print("".join(dict.fromkeys(_variables(self.entries))), end="")
            self._discard()
            return [None] * len(self.entries)
        say(f"{runs(len(self.entries))}: {_HERE if self._local else _WHERE[cluster]}")
        self._say_notes(cluster)
        left = self._queue(self.entries, cluster)
        self._write_list()
        if self._sweep:
            self._adoption = adopt(self.entries, self._sweep, self.folder)
        if not cluster:
            local_runs.run_all([entry for entry in self.entries if entry.state == "frozen"])
            self._write_list()
        show(self.entries)
        say_changes(self.entries)
        self._say_left_behind()
        self._copies.say(self.entries)
        if cluster and self._any("wait"):
            try:
                wait.wait(self.entries, functools.partial(self._queue, cluster=True), left)
            except KeyboardInterrupt:
                self._say_they_run()
                raise
            show(self.entries)
        elif left:
            raise LaunchError(
                f"{len(left)} of {len(self.entries)} runs are not queued: the cluster has no room "
                "for more jobs of yours now. Run the same command later to submit the rest; with "
                "launch.wait=true it waits and submits them when other jobs have ended"
            )
        elif cluster and any(entry.job for entry in self.entries) and not self._followed:
            self._say_they_run()
        waited = self._any("wait") or not cluster
        return [_outcome(entry) if waited else None for entry in self.entries]

    def jobs(self) -> list[RunJob | LocalRunJob]:
        """Return the jobs of submitit for the runs, in the order of `add`."""
        return [entry.handle or _job_of(entry) for entry in self.entries]

    @property
    def _sweep(self) -> dict[str, str] | None:
        """Uid, name, number of runs and folder of the parent run in MLflow; None for one run."""
        if self.parent or len(self.entries) < 2:
            return self.parent
        values = sweep_overrides.span(entry.swept for entry in self.entries)
        name = f"sweep {self.folder.name} {values}".strip()
        # A run that an earlier sweep has begun stays there, and tells this parent nothing.
        ours = {
            entry.run.path
            for entry in self.entries
            if (entry.before.sweep or {}).get("uid", self._uid) == self._uid
        }
        # In the folder is the list of the runs, from which their uploaders know what has not begun.
        folder = str(self.folder.absolute())
        return {"uid": self._uid, "name": name, "runs": str(len(ours)), "folder": folder}

    def _note_swept_values(self) -> None:
        overrides = [entry.overrides for entry in self.entries]
        for entry, values in zip(
            self.entries, sweep_overrides.values_of(overrides, self._searched), strict=True
        ):
            entry.swept = values

    def _any(self, key: str) -> bool:
        """Return whether `launch.KEY` is true for at least one run; then it holds for all."""
        return any(getattr(entry.config.launch, key) for entry in self.entries)

    def _say_they_run(self) -> None:
        # In the form that `hpctrain status` accepts in this working directory.
        usual = self.folder.parent == Path.cwd() / "runs" / "sweeps"
        name = self.folder.name if usual else shlex.quote(str(self.folder))
        say(f"They run without this terminal: `python -m hpctrain status {name}`")
        self._say_pages()

    def _say_notes(self, cluster: bool) -> None:
        for note in notes(self.entries, cluster):
            say(note, style="yellow")

    def _say_changed_code(self, entries: list[Entry]) -> None:
        """Say it of the runs that are submitted now, except those that start from scratch."""
        stay = (entry for entry in entries if entry.state in ("", "finished before"))
        say_changed_code(
            [e for e in stay if e.state or not (e.again or e.config.train.from_scratch)]
        )

    def _say_pages(self) -> None:
        """Print where MLflow will show the runs, as far as its store is there already."""
        for uri, experiment in _stores(self.entries):
            with suppress(TrackingError):
                if (number := store.experiment_id(uri, experiment)) is not None:
                    say(f"MLflow: {experiment_page(uri, number)}")

    def _say_left_behind(self) -> None:
        """Name finished runs of which not everything is in MLflow; to upload takes mlflow."""
        before = [entry.run for entry in self.entries if entry.state == "finished before"]
        left = [(run, line) for run in before if (line := left_behind(run.path))]
        for run, line in left[:3]:
            say(f"{run.name}: {line}", style="yellow")
        if len(left) > 3:
            say(f"… and {len(left) - 3} more (see status)", style="yellow")

    def _refuse_wrong(self) -> None:
        if not self._wrong:
            return
        total = len(self.entries) + len(self._wrong)
        if total == 1:
            raise self._wrong[0][1]
        # Runs often have the same error: it is shown once, with the first run that has it.
        runs_by_problem: dict[str, list[str]] = {}
        for overrides, error in self._wrong:
            for problem in str(error).splitlines():
                runs_by_problem.setdefault(problem, []).append(" ".join(overrides))
        lines = [f"{len(self._wrong)} of {total} runs are wrong; nothing was queued"]
        for problem, affected in runs_by_problem.items():
            lines.append(f"  {problem}  [{runs(len(affected))}, first: {affected[0]}]")
        raise type(self._wrong[0][1])("\n".join(lines))

    def _refuse_unmatched(self) -> None:
        """Refuse patterns that match nothing, which takes longer than all other checks."""
        found = unmatched(self.entries)
        self._wrong += [(entry.overrides, error) for entry, error in found]
        wrong = [entry for entry, _ in found]
        self.entries = [entry for entry in self.entries if entry not in wrong]
        self._refuse_wrong()

    def _scripts(self, cluster: bool) -> list[str]:
        """Return the batch scripts, so that errors are raised before anything is written."""
        size = _USUAL_ARRAY
        # A wrong option of `site` is named even when the controller does not answer.
        texts = [array.text() for array in arrays.plan(self.entries, self.folder, size)]
        try:
            size = sbatch.max_array_size() if cluster else size
        except UnreachableError:
            if not self._any("dry_run"):
                raise
            self._answers = False
            say(
                "Slurm's controller does not answer: its limits and queue are unknown",
                style="yellow",
            )
        if size != _USUAL_ARRAY:
            texts = [array.text() for array in arrays.plan(self.entries, self.folder, size)]
        if not (cluster or self._any("dry_run")):
            for entry in self.entries:
                local_runs.check(entry.config)
        return texts

    def _look(self, cluster: bool) -> None:
        """Set the states for `launch.dry_run`, and check what would be submitted."""
        for entry in self.entries:
            entry.before = entry.run.read()
        asked = cluster and self._answers
        befores = (entry.before for entry in self.entries)
        set_states(self.entries, queue_of(befores) if asked else Queue())
        self._say_changed_code(self.entries)
        todo = [entry for entry in self.entries if not entry.state]
        if asked:
            self._room.check(todo)
        for entry in todo:
            entry.state = "would be submitted" if cluster else "would run here"
            if entry.replaces:
                entry.state = f"would replace {entry.replaces}"

    def _queue(self, entries: list[Entry], cluster: bool) -> list[Entry]:
        """Submit those of the runs that need it; return the ones over the submit limit."""
        with submit_lock({entry.run.path.parent for entry in entries}) as self._locks:
            for entry in entries:
                entry.before = entry.run.read()
            jobs = self._jobs_of(entries, cluster)
            for entry in entries:
                # A job may have ended between the two queries; then run.json says so now.
                if entry.before.submission:
                    entry.before = entry.run.read()
            set_states(entries, jobs)
            if entries is self.entries:  # else it was said, and these were over the limit
                self._say_changed_code(entries)
            in_queue = {job.id.partition("_")[0] for job in jobs.values()}
            in_queue &= {entry.job.partition("_")[0] for entry in self.entries}
            return self._start([entry for entry in entries if not entry.state], cluster, in_queue)

    def _jobs_of(self, entries: list[Entry], cluster: bool) -> Queue:
        """Return the queue; runs that shall run here may have jobs of earlier submissions in it."""
        if not cluster and not (
            sbatch.available() and any(entry.before.submission for entry in entries)
        ):
            return Queue()
        try:
            return queue_of(entry.before for entry in entries)
        except UnreachableError as error:
            if not cluster:
                say(f"{error}: whether jobs of these runs wait is not known", style="yellow")
                return Queue()
            self._discard()
            raise

    def _start(self, todo: list[Entry], cluster: bool, in_queue: set[str]) -> list[Entry]:
        """Freeze runs, submit them to the cluster, if any; return those over the submit limit."""
        if not todo:
            return []
        try:
            for entry in todo:
                trust.check(entry.run.path, entry.config, entry.code.path if entry.code else None)
            if cluster:
                self._room.check(todo)
            _prepare_tracking(todo, cluster)
        except (ConfigError, LaunchError, TrackingError):
            self._discard()
            raise
        archived: dict[Path, Path] = {}
        try:
            todo = replace_waiting(todo)
            self._copies.write(todo)
            for entry in todo:
                if entry.again or may_start_again(entry.config, entry.run, imported_from(entry)):
                    archived[entry.run.path] = entry.run.archive()
                    # A new directory has no provenance yet, also if it keeps the code.
                    entry.before, entry.again, entry.keeps_code = RunRecord(), False, False
            if cluster and todo:
                planned = arrays.plan(todo, self.folder, sbatch.max_array_size(), in_queue)
                return arrays.submit(planned, self._sweep, self._locks, self._write_list)
            for entry in todo:
                freeze(entry.config, entry.run, entry.overrides)
                entry.state = "frozen"
                code = entry.code.digest if entry.code else None
                entry.run.update(code=code, **entry.place_in(self._sweep))
            return []
        except UnreachableError:
            raise
        except (LaunchError, StorageError):
            # Runs that were not queued are restored; runs that were queued stay in the list.
            for entry in todo:
                self._withdraw(entry, archived.get(entry.run.path))
            self._discard()
            raise
        finally:
            # If the disk is full, the links in the folder still show which runs there are.
            with suppress(OSError):
                if self.folder.exists() and cluster:
                    self._write_list()

    def _withdraw(self, entry: Entry, archived: Path | None) -> None:
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

    def _discard(self) -> None:
        """If nothing was queued, delete the new code snapshots and all empty folders."""
        if any(entry.job for entry in self.entries):
            return
        self._copies.discard()
        shutil.rmtree(self.folder, ignore_errors=True)
        folders = {entry.run.path.parent for entry in self.entries}
        empty = [self.folder.parent, *(folder / "code" for folder in folders), *folders]
        for folder in dict.fromkeys([*empty, self.folder.parent.parent]):
            with suppress(OSError):
                if self._locks and os.listdir(folder) == [LOCK]:
                    (folder / LOCK).unlink()
                folder.rmdir()

    def _write_list(self) -> None:
        known = secrets.known()
        content = [
            {
                "run": str(e.run.path),
                "name": sweep_overrides.titled(e.run.name, e.swept),
                "swept": e.swept,
                "job": e.job,
                "state": e.state,
                "overrides": [secrets.reference(text, values=known) for text in e.overrides],
            }
            for e in self.entries
        ]
        write_atomically(self.folder / "sweep.json", json.dumps(content, indent=1) + "\n")


def _prepare_tracking(todo: list[Entry], cluster: bool) -> None:
    """Check the stores of the runs, and create missing experiments.

    A missing SQLite store is left to the first job, since creating it takes seconds.
    """
    needed = _stores([entry for entry in todo if entry.config.tracking.required])
    for uri, experiment in _stores(todo):
        if not (store.is_server(uri) or store.sqlite_path(uri).exists()):
            continue
        try:
            store.initialise(uri, experiment, (uri, experiment) in needed)
        except OfflineError as error:
            if not cluster:
                raise
            # Some login nodes do not reach what the compute nodes do.
            say(f"{error}: each job asks again before it trains, and fails if it is so there")


def _stores(entries: list[Entry]) -> dict[tuple[str, str], None]:
    """Return the stores and experiments to which the runs are uploaded while they train."""
    return dict.fromkeys(
        (str(entry.config.tracking.uri), entry.config.tracking.experiment)
        for entry in entries
        if entry.config.tracking.enabled and entry.config.tracking.upload
    )


def _variables(entries: list[Entry]) -> Iterator[str]:
    """Yield a line for each variable that the ranks set by themselves, before they import torch."""
    for config in (entry.config for entry in entries):
        for name, (value, key) in variables(config.network, config.train).items():
            yield f"# {key}: each rank sets {name}={value}, unless it is exported\n"


def _outcome(entry: Entry) -> float | Exception | None:
    """Return the metric of a run that has ended, or an error if it has not finished."""
    try:
        return outcome(entry.run, entry.config.metric)
    except LaunchError as error:
        return error


def _job_of(entry: Entry) -> RunJob:
    """Return the job of a run that was finished or under way before."""
    submission = entry.run.read().submission
    script, user = (Path(submission.script), submission.user) if submission else (None, None)
    return RunJob(entry.run, entry.config.metric, entry.job if entry.task else "", script, user)
