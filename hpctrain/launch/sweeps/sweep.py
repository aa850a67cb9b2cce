"""A sweep: the runs of one command, which are checked together. They run without this process.

add() each run ── check all ── Submission: skip what is finished or under way, freeze, queue
│                         └── sbatch arrays, or submitit's controller here
└── if any is wrong: nothing is written or queued
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpctrain.base import offered, secrets
from hpctrain.base.errors import HpctrainError, LaunchError
from hpctrain.base.terminal.console import AS_JSON, print_json, say
from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.queue import Queue, UnreachableError, queue_of
from hpctrain.config.frozen import plain
from hpctrain.config.identity import run_path
from hpctrain.config.job_request import JobRequest
from hpctrain.config.schema import Config, LaunchConfig, SiteConfig
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry, Status, progress, runs, show
from hpctrain.launch.jobs import LocalRunJob, RunJob, outcome
from hpctrain.launch.sweeps import before_queueing, wait
from hpctrain.launch.sweeps.before_queueing import Bound, bound_of, copies_of, notes
from hpctrain.launch.sweeps.submission import Submitter
from hpctrain.runs import sweep_overrides
from hpctrain.runs.freeze import check
from hpctrain.runs.run_dir import RunDir

if TYPE_CHECKING:  # it imports Hydra, for which `resume` would wait
    from hpctrain.config.composing.compose_sweep import Composer

_WHERE = {
    True: "sbatch is on the PATH, submitting to Slurm",
    False: "sbatch is not on the PATH, running here, one after the other, with submitit's local "
    "executor",
}
_HERE = "hydra/launcher=submitit_local, running here, one after the other"
_USUAL_ARRAY = 1000  # tasks: that of `max_array_size` where nothing else is set
_RESOURCES = ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb")


class Sweep:
    """The runs of one command.

    Hydra has created `folder` and written multirun.yaml in it.

    Args:
        local: Whether the runs run on this machine, even if sbatch is on the PATH.
        config_dir: That of the command, for the record.
    """

    def __init__(self, folder: Path, local: bool = False, config_dir: str = "") -> None:
        self.folder = folder.absolute()
        self.entries: list[Entry] = []
        self._local, self._config_dir = local, config_dir
        self._wrong: list[tuple[list[str], HpctrainError]] = []

    @classmethod
    def of(
        cls, folder: Path, composer: Composer, runs: Sequence[Sequence[str]], *, local: bool
    ) -> Self:
        """Compose and check runs by their overrides; say what was read of submitit's keys."""
        sweep = cls(folder, local=local, config_dir=composer.config_dir)
        for overrides in progress(runs):
            sweep.add([*overrides], composer.typed)
        for line in composer.notes:
            say(secrets.mask(line))
        return sweep

    def add(self, overrides: list[str], compose: Callable[[list[str]], Config]) -> None:
        """Compose and check one run. An error is kept, and raised by `submit`."""
        try:
            config = compose(overrides)
            run = check(config)
            self.entries.append(Entry(overrides, config, run, config_dir=self._config_dir))
        except HpctrainError as error:
            self._wrong.append((overrides, error))

    def submit(self) -> list[float | Exception | None]:
        """Submit the runs that are neither finished nor under way; return an item per run.

        If this method has waited for the runs (`launch.wait=true`, or no cluster), it is the metric
        or an error; otherwise None. If a run is wrong, nothing was queued; a refusal of the
        scheduler, or more runs than the submit limit allows, is a LaunchError.
        """
        cluster = sbatch.available() and not self._local
        submission = Submitter(self.folder, self.entries, cluster=cluster)
        dry_run = self._any("dry_run")
        try:
            scripts = self._checked(cluster)
            if dry_run:
                self._look(submission, cluster)
        except HpctrainError:
            submission.discard()
            raise
        if dry_run:
            self._say_notes(cluster)
            show(self.entries)
            say(f"Without launch.dry_run this would queue {self._bound()}")
            self._print_json(cluster, scripts)
            if not AS_JSON.get():
                print("\n".join(scripts), end="")
            submission.discard()
            return [None] * len(self.entries)
        say(f"{runs(len(self.entries))}: {_HERE if self._local else _WHERE[cluster]}")
        self._say_notes(cluster)
        try:
            left = submission.queue(self.entries)
        except LaunchError as error:
            if not any(entry.job for entry in self.entries):
                raise
            raise type(error)(f"{self._queued()}: {error}") from error
        submission.write_list()
        if not cluster:
            wait.run_here([entry for entry in self.entries if entry.status is Status.FROZEN])
            submission.write_list()
        show(self.entries)
        if not self._any("wait") or not cluster:
            self._print_json(cluster)
        self._say_under_way()
        now = (e for e in self.entries if e.job and e.status is not Status.UNDER_WAY)
        for code in copies_of(now):
            before_queueing.say_copy(code)
        if cluster and self._any("wait"):
            try:
                wait.wait(self.entries, submission.queue, left)
            except KeyboardInterrupt:
                self._say_they_run()
                raise
            show(self.entries)
            self._print_json(cluster)
        elif left:
            raise LaunchError(
                f"{self._queued()}, {len(left):,} not: the cluster has no room for more jobs of "
                "yours now. Run the same command later to submit the rest; with launch.wait=true "
                "it waits and submits them when other jobs have ended"
            )
        elif cluster and any(entry.job for entry in self.entries):
            self._say_they_run()
        waited = self._any("wait") or not cluster
        return [_outcome(entry) if waited else None for entry in self.entries]

    def jobs(self) -> list[RunJob | LocalRunJob]:
        """Return the jobs of submitit for the runs, in the order of `add`."""
        return [entry.handle or _job_of(entry) for entry in self.entries]

    def _queued(self) -> str:
        queued = sum(entry.job != "" for entry in self.entries)
        return f"{queued:,} of {runs(len(self.entries))} queued"

    def _any(self, key: str) -> bool:
        """Return whether `launch.KEY` is true for at least one run; then it holds for all."""
        return any(getattr(entry.config.launch, key) for entry in self.entries)

    def _checked(self, cluster: bool) -> list[str]:
        """Check all runs, name them and give them their code; return the batch scripts."""
        self._refuse_wrong()
        # What must be imported: this takes longer than all other checks.
        found = offered.foreign_targets.refused(self.entries)
        self._wrong = [(entry.overrides, error) for entry, error in found]
        self._refuse_wrong(len(self._wrong))
        name_apart(self.entries)
        swept = sweep_overrides.values_of([entry.overrides for entry in self.entries])
        for entry, values in zip(self.entries, swept, strict=True):
            entry.swept = values
        before_queueing.take_copies(self.entries)
        return self._scripts(cluster)

    def _refuse_wrong(self, among: int = 0) -> None:
        """Raise the errors of runs, so many of which are `among` the entries."""
        if not self._wrong:
            return
        total = len(self.entries) + len(self._wrong) - among
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

    def _scripts(self, cluster: bool) -> list[str]:
        """Return the batch scripts, so that errors are raised before anything is written."""
        # A wrong option of `site` is named even when the controller does not answer.
        size = _USUAL_ARRAY
        texts = [array.text() for array in arrays.plan(self.entries, self.folder, size)]
        try:
            size = sbatch.max_array_size() if cluster else size
        except UnreachableError:
            if not self._any("dry_run"):
                raise
        if size != _USUAL_ARRAY:
            texts = [array.text() for array in arrays.plan(self.entries, self.folder, size)]
        if not (cluster or self._any("dry_run")):
            for entry in self.entries:
                before_queueing.check_here(JobRequest.of(entry.config))
        return texts

    def _look(self, submission: Submitter, cluster: bool) -> None:
        """Set the states for `launch.dry_run`, and check what would be submitted."""
        for entry in self.entries:
            entry.before = entry.run.read()
        jobs = Queue()
        with suppress(UnreachableError):  # it is said whether the jobs can start
            jobs = queue_of(entry.before for entry in self.entries) if cluster else jobs
        for entry in submission.look(self.entries, jobs):
            entry.mark(Status.WOULD_QUEUE if cluster else Status.WOULD_RUN)

    def _bound(self) -> Bound:
        """Return the most that what is submitted now can take."""
        now = (Status.QUEUED, Status.NO_ROOM, Status.WOULD_QUEUE, Status.WOULD_RUN)
        ran = (Status.FROZEN, Status.ENDED)
        return bound_of([(e.config, 1) for e in self.entries if e.status in (*now, *ran)])

    def _print_json(self, cluster: bool, scripts: Sequence[str] | None = None) -> None:
        """Print what was done, for programs; of a dry run with its scripts."""
        if not AS_JSON.get():
            return
        known, bound = secrets.known(), self._bound()
        told = [entry.listed(known) | {"metric": entry.metric()} for entry in self.entries]
        facts = {
            "dry_run": scripts is not None,
            "where": "slurm" if cluster else "here",
            "sweep": None if scripts is not None else str(self.folder),
            "jobs": bound.jobs,
            "most_hours": bound.hours,
            "unit": bound.unit.partition(" ")[0],
            "runs": told,
        }
        print_json(facts | ({} if scripts is None else {"scripts": [*scripts]}))

    def _say_they_run(self) -> None:
        """Tell how to look after the jobs."""
        # In the form that `hpctrain status` accepts in this working directory.
        usual = self.folder.parent == Path.cwd() / "runs" / "sweeps"
        name = self.folder.name if usual else shlex.quote(str(self.folder))
        say(f"They run without this terminal: `python -m hpctrain status {name}`")

    def _say_notes(self, cluster: bool) -> None:
        for note in notes(self.entries, cluster):
            say(note, style="yellow")

    def _say_under_way(self) -> None:
        """Tell that a queued job keeps its values and its code, whatever was typed now."""
        known = [entry for entry in self.entries if entry.status is Status.UNDER_WAY]
        if any(entry.detail == "pending" for entry in known):
            say(
                f"{runs(len(known))} under way with the resources and the code of their "
                "submission; `cancel` takes jobs that wait out of the queue",
                style="yellow",
            )


def name_apart(entries: list[Entry]) -> None:
    """Add the values of the resources to the names of runs that differ only in them, and say so.

    Resources do not decide the result, so the runs of `launch.nodes=1,2,4` would have one name, and
    only the first would run. They are called `digits-nodes2-3fa92c1b`.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(os.path.realpath(entry.run.path), []).append(entry)
    renamed, keys = 0, set()
    for group in groups.values():
        resources = [_resources(entry.config.launch, entry.config.site) for entry in group]
        swept = [key for key in resources[0] if len({repr(own[key]) for own in resources}) > 1]
        for entry, own in zip(group if swept else [], resources, strict=False):
            values = "".join(f"-{key.rpartition('.')[2]}{own[key]}" for key in swept)
            entry.config.name = re.sub(r"[^\w.-]+", "-", entry.config.name + values)[:64]
            digest = entry.run.data_digest
            entry.run = RunDir(run_path(entry.config, digest), digest)
            renamed += 1
        keys |= {*swept}
    if renamed:
        say(
            f"{runs(renamed)} differ only in {', '.join(sorted(keys))}, which does not change the "
            "result: their names have the values"
        )


def _resources(launch: LaunchConfig, site: SiteConfig) -> dict[str, Any]:
    own = {f"launch.{key}": getattr(launch, key) for key in _RESOURCES}
    return own | {f"site.{key}": value for key, value in plain(site).items()}


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
    ids = [entry.job, *entry.behind] if entry.task else [""]
    return RunJob(entry.run, entry.config.metric, ids, script, user)
