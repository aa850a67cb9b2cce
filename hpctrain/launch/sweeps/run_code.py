"""The code that the runs of a sweep run from: their copies of it, and what has changed in it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from hpctrain.base.terminal.console import say
from hpctrain.base.terminal.terminal import few
from hpctrain.launch.entry import Entry, Status
from hpctrain.runs.code import snapshot, trained_code
from hpctrain.runs.code.snapshot import Snapshot


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


def say_copies(entries: Sequence[Entry]) -> None:
    """Tell which code snapshots the runs use that were submitted now."""
    for code in copies_of(e for e in entries if e.job and e.status is not Status.UNDER_WAY):
        say_copy(code)


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
