"""A sweep: checked whole, frozen, submitted, left alone.

add() each run ── check all ── skip what is done or under way ── freeze ── sbatch array
│                                                 or submitit's local executor
└── any wrong: nothing is written or queued
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.config import Config, from_omegaconf, known_keys
from hpctrain.errors import ConfigError, HpctrainError, LaunchError
from hpctrain.explain import explain
from hpctrain.freeze import check, freeze
from hpctrain.launch import local, slurm
from hpctrain.launch.script import sbatch_script
from hpctrain.rundir import RunDir
from hpctrain.tracking import store

_WHERE = {
    True: "sbatch is on the PATH, submitting to Slurm",
    False: "sbatch is not on the PATH, running here, one after the other, with submitit's local "
    "executor",
}


@dataclass
class Entry:
    """One run of a sweep, and what became of it."""

    overrides: list[str]
    config: Config
    run: RunDir
    state: str = ""
    job: str = ""
    is_new: bool = False  # its directory was made by this sweep
    before: str = ""  # its run.json's state when it was submitted


class Sweep:
    """Runs that were asked for together.

    Args:
        folder: for the scripts and job lists; Hydra has made it and put multirun.yaml there.
        parent: uid and name of the MLflow run above these; None: they have one if they are several.
    """

    def __init__(self, folder: Path, parent: Mapping[str, str] | None = None) -> None:
        self.folder = folder.absolute()
        self.parent = parent
        self.entries: list[Entry] = []
        self._wrong: list[tuple[list[str], HpctrainError]] = []

    def add(self, overrides: list[str], compose: Callable[[list[str]], DictConfig]) -> None:
        """Compose and check one run; what is wrong is kept for `submit` to tell."""
        try:
            config = from_omegaconf(compose(overrides))
            self.entries.append(Entry(overrides, config, check(config)))
        except (HydraException, OmegaConfBaseException) as error:
            self._wrong.append((overrides, ConfigError(explain(error, known_keys()))))
        except HpctrainError as error:
            self._wrong.append((overrides, error))

    def submit(self) -> list[float | Exception | None]:
        """Submit what is missing.

        Returns:
            In the order of `add`: with `launch.wait=true` the metric, or what went wrong; else
            None.

        Raises:
            HpctrainError: something is wrong with any run; nothing was queued.
            LaunchError: the scheduler refused.
        """
        cluster = slurm.available()
        try:
            self._refuse_wrong()
            launch = self.entries[0].config.launch
            scripts = list(self._scripts())  # what is wrong in one shows here
            for entry in self.entries if not (cluster or launch.dry_run) else ():
                local.check(entry.config)
        except HpctrainError:
            self._discard()
            raise
        if launch.dry_run:
            print("\n".join(scripts))
            self._discard()
            return [None] * len(self.entries)
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"[bold]{len(self.entries)} runs[/]: {_WHERE[cluster]}", highlight=False)
        self._start(self._todo(cluster), cluster)
        self._write_list()
        console.print(self._table())
        if cluster and not launch.wait:
            console.print(f"They run without this terminal. squeue --me shows them; {self.folder}")
            return [None] * len(self.entries)
        if cluster:
            slurm.wait([entry.job for entry in self.entries if entry.job])
            for entry in self.entries:
                entry.state = entry.run.read().get("state", entry.state)
            console.print(self._table())
        return [_outcome(entry) for entry in self.entries]

    def _start(self, todo: list[Entry], cluster: bool) -> None:
        if not todo:
            return
        self._initialise_tracking()
        parent = self.parent
        if parent is None and len(self.entries) > 1:
            parent = {"uid": uuid.uuid4().hex, "name": f"sweep {self.folder.name}"}
        for entry in todo:
            entry.is_new = not entry.run.path.exists()
            freeze(entry.config)
            # MLflow shows the runs of a sweep under one parent; a run stays with its first sweep.
            if parent and "sweep" not in entry.run.read():
                entry.run.update(sweep=dict(parent))
        if cluster:
            self._submit(todo)
        else:
            for entry in todo:
                entry.state, entry.job = local.run(entry.config, entry.run)

    def _refuse_wrong(self) -> None:
        if not self._wrong:
            return
        total = len(self.entries) + len(self._wrong)
        if total == 1:
            raise self._wrong[0][1]
        # Runs often share a mistake: it is said once, with the first run that has it.
        having: dict[str, list[str]] = {}
        for overrides, error in self._wrong:
            for problem in str(error).splitlines():
                having.setdefault(problem, []).append(" ".join(overrides))
        lines = [f"{len(self._wrong)} of {total} runs are wrong; nothing was queued"]
        for problem, runs in having.items():
            lines.append(f"  {problem}  [{len(runs)} runs, first: {runs[0]}]")
        raise type(self._wrong[0][1])("\n".join(lines))

    def _todo(self, cluster: bool) -> list[Entry]:
        """What is neither finished nor under way nor here twice."""
        queued = slurm.queued_jobs() if cluster else {}
        seen: dict[Path, Entry] = {}
        for entry in self.entries:
            known = entry.run.read()
            job = str(known.get("job_id", ""))
            if entry.run.path in seen:
                entry.state = "the same run as above"
            elif known.get("state") == "finished":
                entry.state = "finished before"
            # A failed run's number may be another job's, on a cluster that counts anew.
            elif job in queued and known.get("state") != "failed":
                entry.state, entry.job = f"{queued[job].lower()} already", job
            elif entry.run.is_locked():
                entry.state = "running elsewhere"
            seen.setdefault(entry.run.path, entry)
        return [entry for entry in self.entries if not entry.state]

    def _submit(self, todo: list[Entry]) -> None:
        try:
            self._submit_arrays(todo)
        except LaunchError:
            # What was not queued leaves no trace; what was, stays listed.
            for entry in todo:
                if entry.is_new and not entry.job:
                    shutil.rmtree(entry.run.path)
                elif entry.before and not entry.job:
                    entry.run.update(state=entry.before)
            if any(entry.job for entry in todo):
                self._write_list()
            else:
                self._discard()
            raise

    def _submit_arrays(self, todo: list[Entry]) -> None:
        for number, group in enumerate(_same_resources(todo)):
            folder = self.folder / f"array-{number}"
            (folder / "tasks").mkdir(parents=True)
            (folder / "batch").mkdir()
            for index, entry in enumerate(group):
                (folder / "tasks" / str(index)).symlink_to(entry.run.path)
            script = folder / "job.sh"
            script.write_text(sbatch_script(group[0].config, folder, len(group)))
            # Before sbatch: the job may begin, and say so, before it has returned.
            for entry in group:
                entry.before = entry.run.read()["state"]
                entry.run.update(state="queued", job_id="", scripts=str(folder))
            array = slurm.sbatch(script, group[0].config)
            for index, entry in enumerate(group):
                entry.state, entry.job = "queued", f"{array}_{index}"
                entry.run.update(job_id=entry.job)

    def _initialise_tracking(self) -> None:
        """Once, before any job starts: many processes at a fresh store lose the race."""
        targets = {
            (entry.config.tracking.uri, entry.config.tracking.experiment)
            for entry in self.entries
            if entry.config.tracking.enabled and entry.config.tracking.upload
        }
        for uri, experiment in targets:
            if uri is not None:
                store.initialise(uri, experiment)

    def _scripts(self) -> Iterator[str]:
        """Each array's script, with the runs that its tasks stand for."""
        for number, group in enumerate(_same_resources(self.entries)):
            folder = self.folder / f"array-{number}"
            lines = [f"# {folder}/job.sh"]
            for index, entry in enumerate(group):
                lines.append(f"# tasks/{index} -> {entry.run.path}  ({' '.join(entry.overrides)})")
            yield "\n".join([*lines, sbatch_script(group[0].config, folder, len(group))])

    def _discard(self) -> None:
        """Nothing was queued, so nothing stays: neither Hydra's note nor empty folders."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for parent in list(self.folder.parents)[:2]:
            try:
                parent.rmdir()
            except OSError:
                return

    def _write_list(self) -> None:
        content = [
            {"run": str(e.run.path), "job": e.job, "state": e.state, "overrides": e.overrides}
            for e in self.entries
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sweep.json").write_text(json.dumps(content, indent=1) + "\n")

    def _table(self) -> Table:
        names = dict.fromkeys(e.config.metric for e in self.entries if _metric(e) is not None)
        table = Table("run", "overrides", "state", "job", *names)
        common = set.intersection(*(set(entry.overrides) for entry in self.entries))
        for entry in self.entries:
            own = [text for text in entry.overrides if text not in common or len(self.entries) == 1]
            # Text, for an override may look like rich's markup.
            cells = [entry.run.name, " ".join(own), entry.state, entry.job]
            values = {entry.config.metric: _metric(entry)}
            for name in names:
                value = values.get(name)
                cells.append("" if value is None else f"{value:.4f}")
            table.add_row(*map(Text, cells))
        return table


def _same_resources(entries: list[Entry]) -> Iterator[list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        config = entry.config
        key = json.dumps([asdict(config.launch), asdict(config.site), config.name])
        groups.setdefault(key, []).append(entry)
    yield from groups.values()


def _metric(entry: Entry) -> float | None:
    value = (entry.run.read().get("result") or {}).get(entry.config.metric)
    return None if value is None else float(value)


def _outcome(entry: Entry) -> float | Exception | None:
    known = entry.run.read()
    if known.get("state") != "finished":
        return LaunchError(
            f"{entry.run.name} is {known.get('state', 'lost')}, not finished: see {entry.run.logs}"
        )
    return _metric(entry)
