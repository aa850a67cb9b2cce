"""The copies of the code that the runs of one sweep run from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch.arrays import Entry
from hpctrain.launch.output import say
from hpctrain.runs.code import snapshot


class Copies:
    """Code snapshots: one for all runs of a sweep with the same settings."""

    def __init__(self) -> None:
        self._new: list[Path] = []

    def take(self, entries: Sequence[Entry]) -> None:
        """Give each run its snapshot, which is not written yet; a run may keep its earlier one."""
        taken: dict[tuple[object, ...], snapshot.Snapshot | None] = {}
        for entry in entries:
            if entry.keeps_code and entry.code:
                continue
            launch = entry.config.launch
            where = entry.config.output_dir, entry.config.data.path
            key = *where, launch.snapshot, launch.snapshot_max_mb
            if key not in taken:
                taken[key] = snapshot.take(entry.config)
            entry.code, entry.keeps_code = taken[key], False

    def write(self, entries: Sequence[Entry]) -> None:
        """Write the snapshots of these runs that do not exist yet."""
        for code in {entry.code.path: entry.code for entry in entries if entry.code}.values():
            if code.write():
                self._new.append(code.path)

    def discard(self) -> None:
        """Delete the snapshots that `write` has made."""
        for path in self._new:
            shutil.rmtree(path, ignore_errors=True)

    def say(self, entries: Sequence[Entry]) -> None:
        """Tell which snapshots the runs use that were submitted now."""
        submitted = (e for e in entries if e.job and not e.state.endswith("already"))
        for code in {entry.code.path: entry.code for entry in submitted if entry.code}.values():
            say(f"code: a copy, {code.path}")
            for folder in code.unfrozen:
                say(
                    f"  not copied, because it is in no git repository: {folder}. What you edit "
                    "there changes jobs that wait, and jobs that start again; after `git init` "
                    "they run from a copy",
                    style="yellow",
                )
            for line in code.left_out:
                say(f"  not copied: {line}", style="yellow")
            for line in code.telling:
                say(f"  whoever may read the copy reads a secret: {line}", style="yellow")
