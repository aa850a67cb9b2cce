"""What is found before the runs of a sweep are queued.

Notes stop nothing; a cluster that would not run the jobs, a GPU on which nothing fits, or a budget
in which no run ends, does.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpctrain.config.frozen import dump
from hpctrain.config.rank_counts import fitting_nodes
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.estimates import cautions, time_limit
from hpctrain.launch import arrays
from hpctrain.launch.entry import Entry, Status
from hpctrain.launch.output import runs, say
from hpctrain.runs.budget import WORDS, Budget
from hpctrain.slurm import node_range, sbatch
from hpctrain.slurm.partition_limit import beyond_partition, road
from hpctrain.slurm.queue import UnreachableError

_AUTO = f"launch.time_min={time_limit.AUTO}"
_MOST = 8  # unlike configs that are looked at: each takes seconds
_DECIDING = ("model", "task", "data", "train", "parallel", "precision", "optimizer", "launch")


def notes(entries: Sequence[Entry], cluster: bool) -> Iterator[str]:
    """Yield each note once for all runs; on a `cluster`, Slurm is asked for limits of time."""
    configs = [entry.config for entry in entries]
    chosen = {e.config.launch.time_min: e.config for e in entries if _AUTO in e.overrides}
    yield from filter(None, map(time_limit.note, chosen.values()))
    yield from filter(
        None,
        dict.fromkeys(
            node_range.note(each.launch, each.train.global_batch_size, fitting_nodes(each))
            for each in configs
        ),
    )
    yield from cautions.of_sweep(configs)
    if not cluster and any(each.launch.pack > 1 for each in configs):
        yield "launch.pack is of jobs of Slurm: without a cluster, runs go one after the other"
    if cluster:
        asked = {(each.site.partition, each.launch.time_min): each.launch for each in configs}
        beyond = (beyond_partition(launch, partition) for (partition, _), launch in asked.items())
        yield from filter(None, dict.fromkeys(beyond))
        places = {(each.site.partition, each.site.qos, each.launch.chain): each for each in configs}
        roads = (road(each.site, each.launch.chain) for each in places.values())
        yield from dict.fromkeys(each.why for each in roads if each.name not in ("", "requeue"))


def gpu_kinds(entries: Sequence[Entry]) -> None:
    """Show what is chosen on each kind of `launch.gpu_type`; where nothing fits: a ConfigError.

    To foresee it needs torch, which is not imported here: another process does.
    """
    unlike: dict[str, list[Entry]] = {}
    for entry in (entry for entry in entries if entry.config.launch.gpu_type):
        key = repr([getattr(entry.config, name) for name in _DECIDING])
        unlike.setdefault(key, []).append(entry)
    if not unlike:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpctrain.plan.by_kind"]
        for number, (first, *others) in enumerate([*unlike.values()][:_MOST]):
            path = Path(folder, f"{number}.yaml")
            path.write_text(dump(first.config))
            about = f"{runs(1 + len(others))} like {first.run.name}"
            command.append(json.dumps([about, str(path), *first.overrides]))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    if done.returncode not in (0, ConfigError.exit_code):
        raise LaunchError(f"launch.gpu_type: the layouts are not known: {done.stderr[-2000:]}")
    refused = said.pop() if done.returncode else ""
    for line in said:
        say(line)
    if refused:
        raise ConfigError(refused)
    if len(unlike) > _MOST:
        say(f"launch.gpu_type: {len(unlike) - _MOST} more kinds of runs were not looked at")


def within_budget(
    entries: Sequence[Entry], todo: list[Entry], folder: Path
) -> tuple[list[Entry], list[Entry]]:
    """Return those of the runs `todo` that fit in the budget, in their order, and the others.

    The budget is that of all `entries`, and is written into the folder of the sweep. If none fits
    and none is under way, it is a LaunchError: the same command would never find room.
    """
    budget = Budget.planned({entry.run.path: entry.config for entry in entries})
    if budget is None:
        return todo, []
    standing = budget.standing(folder)
    left = standing.left
    found = {by: sum(budget.shares[str(e.run.path)].foreseen == by for e in todo) for by in WORDS}
    fitting, others = list[Entry](), list[Entry]()
    for entry in todo:
        share = budget.shares[str(entry.run.path)]
        hours = share.hours if entry.again else budget.needs(entry.run.path)
        if hours <= left:
            left -= hours
            fitting.append(entry)
        else:
            entry.mark(Status.OVER_BUDGET, f"{hours:.4g} {budget.unit}")
            others.append(entry)
    said = [f"{count} of {runs(len(todo))} {WORDS[by]}" for by, count in found.items() if count]
    text = "; ".join([str(standing), *said])
    if others and not fitting and not standing.under_way:
        raise LaunchError(
            f"launch.budget_gpu_hours={budget.hours:g}: nothing was queued, as no run that is left "
            f"is foreseen to end within it ({others[0].run.name} {others[0].state}). {text}"
        )
    say(text)
    budget.write(folder)
    return fitting, others


class Room:
    """The answers of the scheduler, one for each set of resources; nothing is written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked: set[str] = set()

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise a LaunchError if the scheduler would not run a job with `launch.check`."""
        requests: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry.config.launch.check:
                request = repr((entry.config.launch, entry.config.site))
                requests.setdefault(request, []).append(entry)
        for request, group in requests.items():
            if request in self._checked:
                continue
            self._checked.add(request)
            (array, *_) = arrays.plan(group, self._folder, sbatch.max_array_size())
            try:
                start = sbatch.expected_start(array.text(), array.config)
            except UnreachableError as error:
                say(f"not checked whether the jobs can start: {error}", style="yellow")
                self._checked.update(requests)  # the other requests would take as long
                return
            say(f"{runs(len(group))} like {group[0].run.name}: {start}")
