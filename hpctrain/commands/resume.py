"""`python -m hpctrain resume [RUN|SWEEP...] [KEY=VALUE...]`: continue runs that did not finish."""

import argparse
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hpctrain.base.errors import ConfigError, LaunchError, StorageError
from hpctrain.base.terminal.terminal import printable
from hpctrain.cluster.slurm import sbatch
from hpctrain.commands.facts import Facts
from hpctrain.commands.select import (
    add_arguments,
    are_folders,
    is_search,
    one_sweep,
    runs_of,
    search_of,
    searches_of,
    select,
)
from hpctrain.commands.state import State, states_of
from hpctrain.config.frozen import executed, load
from hpctrain.config.identity import changeable, signature
from hpctrain.config.rules import own_loop
from hpctrain.config.schema import LaunchConfig
from hpctrain.launch.entry import Entry
from hpctrain.launch.sweeps.sweep import Sweep
from hpctrain.runs import trust
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.freeze import check
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.meta import left_behind

_BY_DEFAULT = ("failed", "interrupted", "lost")  # states that are resumed if no run is named
_BY_NAME = (*_BY_DEFAULT, "cancelled", "created", "paused")
_FIXED = ("name", "output_dir")


def main(argv: list[str]) -> int:
    """Submit runs with their frozen configs; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain resume",
        description="Submit runs again that have failed, were preempted or are lost. Each run "
        "continues from its last checkpoint with its frozen config, on this machine where there "
        "is no Slurm or hydra/launcher=submitit_local is given. KEY=VALUE changes a config key "
        "that has no effect on the "
        f"result: {', '.join(key for key in changeable() if key not in _FIXED)}.",
    )
    add_arguments(parser, "default: all that have failed or were preempted, if not cancelled")
    parser.add_argument(
        "--code",
        choices=("kept", "current"),
        default="kept",
        help="kept: the copy of the code that the run was submitted with; current: the code as it "
        "is now (default: kept)",
    )
    trust.add_argument(parser)
    options = parser.parse_args(argv)
    overrides = [text for text in options.runs if "=" in text and not os.path.exists(text)]
    names = [text for text in options.runs if text not in overrides]
    launchers = {f"hydra/launcher={name}": name for name in ("submitit_slurm", "submitit_local")}
    asked = [launchers[text] for text in overrides if text in launchers]
    overrides = [text for text in overrides if text not in launchers]
    if (meant := one_sweep(options.dir, names)) is not None and is_search(meant):
        raise ConfigError(
            f"{meant}: a search goes on when its command is given again. `resume TRIAL` trains one "
            "trial to its end, also one that was pruned"
        )
    found = states_of(select(options.dir, names))
    named = bool(names) and not are_folders(names)
    alone = named and len(found) == len(names)
    trials = set() if alone else _trials([run for run, s in found if s.name in _BY_NAME])
    free = [(run, state) for run, state in found if run.path not in trials]
    chosen = [run for run, state in free if _is_chosen(run, state, named=named)]
    local = asked[-1:] == ["submitit_local"]
    away = [run for run in chosen if run.submission]
    if away and not (local or sbatch.available()):
        raise LaunchError(
            f"{away[0].name} was submitted to Slurm, but sbatch is not on the PATH: resume it "
            "on the cluster, or train it here with the command that started it, without -m"
        )
    entries = [_entry(run, overrides, options.code) for run in chosen]
    if entries:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
        folder = Path(entries[0].config.output_dir) / "sweeps" / stamp
        folder.mkdir(parents=True)
        sweep = Sweep(folder, local=local)
        sweep.entries = entries
        sweep.submit()
    taken = {run.path for run in chosen}
    rest = [(run, state) for run, state in found if run.path not in taken]
    if options.json:
        done = [{"run": str(e.run.path), "state": e.state, "job_id": e.job} for e in entries]
        left = [{"run": str(r.path), "state": s.name, "job_id": r.job_id} for r, s in rest]
        print(json.dumps(done + left))
    else:
        others = [(run, state) for run, state in rest if run.path not in trials]
        _say_rest(others, everything=bool(names) or not entries)
        if trials:
            print(
                f"{len(trials)} trial{'s' * (len(trials) > 1)} left to their searches, which go on "
                "when their commands are given again; `resume TRIAL` trains one to its end"
            )
        if not found:
            print("no runs here")
    return 0


def _trials(runs: list[Facts]) -> set[Path]:
    """Return the runs that belong to searches, whose workers decide which trials go on.

    A worker without Slurm leaves no submission, but its search lists the run. A trial that was
    resumed by its name has a submission of its own, and is a run like others.
    """
    listed = set[Path]()
    for folder in {run.path.parent for run in runs}:
        for search in searches_of(folder):
            # A damaged list keeps no other run from going on.
            with suppress(StorageError):
                listed |= {folder / trial.name for trial in runs_of(search)}
    return {
        run.path
        for run in runs
        if (search_of(run.submission) if run.submission else run.path in listed)
    }


def _say_rest(rest: list[tuple[Facts, State]], *, everything: bool) -> None:
    """Print the runs that were not resumed."""
    for run, state in rest:
        by_name = state.name in _BY_NAME
        if not (by_name or everything):
            continue
        hint = f"`resume {run.name}` brings it back" if by_name else "not resumed"
        if state.name == "finished":
            hint += f" (`resume --branch {run.name} train.max_steps=N` trains it longer)"
        reason = f", {state.reason}" if state.reason else ""
        print(printable(f"{run.name}: {state.name}{reason}; {hint}"))
        if state.name == "finished" and (problem := left_behind(run.path)):
            print(printable(f"{run.name}: {problem}"))


def _is_chosen(run: Facts, state: State, *, named: bool) -> bool:
    if named:
        return state.name in _BY_NAME
    # Somebody has stopped it, with `hpctrain cancel` or with `scancel`.
    by_slurm = run.ended is not None and run.ended.state.startswith("CANCELLED")
    if state.name not in _BY_DEFAULT or run.stop_request is not None or by_slurm:
        return False
    return not own_loop.is_program(load(RunDir.open(run.path).config_file))


def _entry(run: Facts, overrides: list[str], code: str) -> Entry:
    directory = RunDir.open(run.path)
    for text in overrides:
        if text.partition("=")[0] in _FIXED:
            raise ConfigError(f"{text}: an existing run keeps its name and its folder")
    config = load(directory.config_file, overrides)
    config.output_dir = str(directory.path.parent)  # it may have been moved
    trust.check(run.path, executed(config), directory.code_copy)
    own_loop.check_callable(config)
    # These keys were meant for the old submission only.
    overridden = {text.partition("=")[0] for text in overrides}
    for key in ("wait", "dry_run", "rerun"):
        if f"launch.{key}" not in overridden:
            setattr(config.launch, key, getattr(LaunchConfig(), key))
    if "train.from_scratch" not in overridden:
        config.train.from_scratch = False
    digest = run.record.data_digest
    # Not the signature in the directory's name: a user may have renamed the directory.
    before = signature(load(directory.config_file), digest)
    if signature(config, check(config).data_digest) != before:
        raise ConfigError(
            f"{run.name}: with {' '.join(overrides) or 'the data set as it is now'} it would be "
            "another run: start that one by its own command; resume changes only "
            f"{', '.join(key for key in changeable() if key not in _FIXED)}"
        )
    kept = None
    if code == "kept" and (copy := directory.code_copy):
        kept = Snapshot.load(copy)
        if kept is None:
            raise ConfigError(
                f"{run.name}: {copy}, the copy of the code that it was submitted with, is gone; "
                "--code current uses the code as it is now"
            )
    return Entry(
        overrides,
        config,
        RunDir(run.path, digest),
        kept,
        keeps_code=kept is not None,
        config_dir=run.record.config_dir,
        earlier=[*run.record.overrides],
    )
