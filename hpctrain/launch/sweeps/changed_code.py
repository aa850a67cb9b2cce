"""Say which runs of a sweep will go on, or have finished, with other code than that of now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch.arrays import Entry
from hpctrain.launch.output import say
from hpctrain.runs.code import trained_code
from hpctrain.terminal import few


def say_changed_code(entries: Sequence[Entry]) -> None:
    """Name the files and functions that differ, before the runs are queued, and the choice.

    The runs go on from a checkpoint when they are submitted, or are finished.
    """
    groups: dict[tuple[bool, str], list[Entry]] = {}
    for entry in entries:
        if not entry.before.attempts:
            continue
        if found := trained_code.changes(entry.config, entry.run, imported_from(entry)):
            groups.setdefault((entry.before.state == "finished", found), []).append(entry)
    for (finished, found), group in groups.items():
        names = few((entry.run.name for entry in group), 1)
        what = "A finished run is not trained again"
        cure = "launch.rerun=all does that, and keeps the old directory under another name"
        if not finished:
            what = "A run goes on from its checkpoint with the code as it is now"
            cure = trained_code.CHOICE
        say(f"{names}: the code has changed: {found}. {what}; {cure}", style="yellow")


def imported_from(entry: Entry) -> Sequence[Path] | None:
    """Return the folders that a run will import from; None means those of this process."""
    return entry.code.pythonpath if entry.code is not None and entry.keeps_code else None
