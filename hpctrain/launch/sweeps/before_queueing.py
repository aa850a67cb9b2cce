"""What is found before the runs of a sweep are queued, and the code that they run from.

Notes stop nothing; a cluster that would not run the jobs does, and more jobs or hours than bounded.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError
from hpctrain.base.terminal.console import say
from hpctrain.base.terminal.terminal import few
from hpctrain.cluster.slurm import sbatch
from hpctrain.cluster.slurm.partition_limit import beyond_partition, road
from hpctrain.cluster.slurm.queue import UnreachableError
from hpctrain.config.job_request import JobRequest
from hpctrain.config.rules.combinations import refused
from hpctrain.config.schema import Config, LaunchConfig, SiteConfig
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry, Status, runs
from hpctrain.runs.code import snapshot, trained_code
from hpctrain.runs.code.snapshot import Snapshot

_MANY_CALLS = 10  # of sbatch, for one command


def notes(entries: Sequence[Entry], cluster: bool) -> Iterator[str]:
    """Yield each note once for all runs; on a `cluster`, Slurm is asked for limits of time."""
    configs = [entry.config for entry in entries]
    kinds = {repr(replace(config, seed=0)): config for config in configs}
    idle = (text for config in kinds.values() for text in refused(config, "idle_keys"))
    yield from dict.fromkeys(idle)
    yield from offered.right_size.of_sweep(kinds.values())
    if not cluster and any(each.launch.pack > 1 for each in configs):
        yield "launch.pack is of jobs of Slurm: without a cluster, runs go one after the other"
    if cluster:
        asked = {(each.site.partition, each.launch.time_min): each.launch for each in configs}
        beyond = (beyond_partition(launch, partition) for (partition, _), launch in asked.items())
        yield from filter(None, dict.fromkeys(beyond))
        places: dict[tuple[str | None, str | None, int | None], list[Entry]] = {}
        for entry in entries:
            each = entry.config
            place = each.site.partition, each.site.qos, each.launch.chain
            places.setdefault(place, []).append(entry)
        configs_of = ((all_[0].config, all_) for all_ in places.values())
        roads = [(road(each.site, each.launch.chain), all_) for each, all_ in configs_of]
        yield from dict.fromkeys(way.why for way, _ in roads if way.name not in ("", "requeue"))
        chains = [(way.jobs, entry) for way, all_ in roads for entry in all_ if way.jobs > 1]
        calls = sum(
            jobs
            for jobs, entry in chains
            if entry.config.launch.rerun == "all" or entry.run.read().state != "finished"
        )
        if calls > _MANY_CALLS:
            yield (
                f"{calls:,} calls of sbatch, one for each run and link of a chain: where a site "
                "takes few a minute, give fewer runs at a time, or launch.chain=1"
            )


def check_here(job: JobRequest) -> None:
    """Check that the job needs only one machine."""
    if 1 not in job.nodes:
        reason = "sbatch is not on the PATH, and without a cluster"
        cure = "python -m hpctrain cluster up"
        if sbatch.available():
            reason, cure = "with hydra/launcher=submitit_local", "hydra/launcher=submitit_slurm"
        raise ConfigError(
            f"launch.nodes={job.launch.nodes}: {reason} a run has one node; launch.nodes=1, "
            f"or try {cure}"
        )


def check_room(entries: Sequence[Entry], folder: Path, checked: set[str]) -> None:
    """Ask the scheduler once for each set of resources; nothing is written.

    What it has answered is added to `checked`. A LaunchError says that it would not run a job.
    """
    requests: dict[str, list[Entry]] = {}
    for entry in entries:
        request = repr((entry.config.launch, entry.config.site))
        requests.setdefault(request, []).append(entry)
    for request in [each for each in requests if each not in checked]:
        checked.add(request)
        group = requests[request]
        try:
            (array, *_) = arrays.plan(group, folder, sbatch.max_array_size())
            start = sbatch.expected_start(array.text(), array.request)
        except UnreachableError as error:
            say(f"not checked whether the jobs can start: {error}", style="yellow")
            checked.update(requests)  # the other requests would take as long
            return
        say(f"{runs(len(group))} like {group[0].run.name}: {start}")


class Bound(NamedTuple):
    """The most that jobs can take: each counts with its time limit."""

    jobs: int
    hours: float
    unit: str

    def __str__(self) -> str:
        jobs = f"{self.jobs:,} job" + "s" * (self.jobs != 1)
        return f"{jobs}, which by their time limits may take {self.hours:.4g} {self.unit}"


def bound_of(runs_of: Collection[tuple[Config, int]]) -> Bound:
    """Return the bound of so many runs of these valid configs."""
    alike: Counter[str] = Counter()
    one: dict[str, LaunchConfig] = {}
    hours, chains = 0.0, dict[str, int]()
    for config, count in runs_of:
        launch, site = config.launch, config.site
        shape = repr((launch, site))
        alike[shape] += count
        one[shape], chains[shape] = launch, road(site, launch.chain).jobs
        hours += count * _most_hours(launch, site)
    jobs = sum(-(-n // one[shape].pack) * chains[shape] for shape, n in alike.items())
    gpus = any(config.launch.gpus_per_node for config, _ in runs_of)
    return Bound(jobs, hours, "GPU-hours" if gpus else "rank-hours (no GPUs)")


def check_bounds(runs_of: Collection[tuple[Config, int]]) -> None:
    """Raise a ConfigError if the jobs of so many runs exceed `max_jobs` or `budget_gpu_hours`."""
    bound = bound_of(runs_of)
    for key, value in (("max_jobs", bound.jobs), ("budget_gpu_hours", bound.hours)):
        given = (getattr(config.launch, key) for config, _ in runs_of)
        most = min((each for each in given if each is not None), default=None)
        if most is not None and value > most:
            raise ConfigError(
                f"launch.{key}={most:g}: this would queue {bound}, so nothing was queued; give "
                "fewer runs, a shorter launch.time_min, or a larger bound"
            )


def _most_hours(launch: LaunchConfig, site: SiteConfig) -> float:
    """Return what a run takes if each job of its chain lasts as long as it may."""
    per_node = launch.gpus_per_run or launch.gpus_per_node or launch.tasks_per_node
    nodes = launch.node_numbers[-1] + launch.spares
    return launch.time_min / 60 * nodes * per_node * road(site, launch.chain).jobs


def take_copies(entries: Sequence[Entry]) -> None:
    """Give each run its code snapshot, which is not written yet; a run may keep its earlier one.

    Runs with the same settings share one.
    """
    taken: dict[tuple[object, ...], Snapshot | None] = {}
    for entry in entries:
        if entry.keeps_code and entry.code:
            continue
        config = entry.config
        where = config.output_dir, config.data.path
        key = *where, config.launch.snapshot
        if key not in taken:
            taken[key] = snapshot.take(config.launch, *where)
        entry.code, entry.keeps_code = taken[key], False


def copies_of(entries: Iterable[Entry]) -> list[Snapshot]:
    """Return the code snapshots of these runs, each once."""
    return [*{entry.code.path: entry.code for entry in entries if entry.code}.values()]


def imported_from(entry: Entry) -> Sequence[Path] | None:
    """Return the folders that a run will import from; None means those of this process."""
    return entry.code.pythonpath if entry.code is not None and entry.keeps_code else None


def say_copy(code: Snapshot) -> None:
    """Tell where a code snapshot is, what is not in it."""
    say(f"code: a copy, {code.path}")
    for folder in code.unfrozen:
        say(
            f"  not copied, because it is in no git repository: {folder}. What you edit there "
            "changes jobs that wait, and jobs that start again; after `git init` they run from a "
            "copy",
            style="yellow",
        )
    for line in code.left_out:
        say(f"  not copied: {line}", style="yellow")


def say_changed(entries: Sequence[Entry]) -> None:
    """Name the files and functions that differ, before the runs are queued, and the choice.

    The runs go on from a checkpoint when they are submitted, unless they start from scratch, or are
    finished.
    """
    groups: dict[tuple[bool, str], list[Entry]] = {}
    for entry in entries:
        goes_on = not (entry.again or entry.config.train.from_scratch)
        told = entry.status is Status.DONE or (entry.status is Status.OPEN and goes_on)
        if not told or not entry.before.attempts:
            continue
        if found := trained_code.changes(entry.run, imported_from(entry)):
            groups.setdefault((entry.before.state == "finished", found), []).append(entry)
    for (finished, found), group in groups.items():
        names = few((entry.run.name for entry in group), 1)
        what = "A finished run is not trained again"
        cure = "launch.rerun=all does that, and keeps the old directory under another name"
        if not finished:
            what = "A run goes on from its checkpoint with the code as it is now"
            cure = trained_code.CHOICE
        say(f"{names}: the code has changed: {found}. {what}; {cure}", style="yellow")
