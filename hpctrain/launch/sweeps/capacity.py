"""Whether the cluster has room for the jobs of a sweep, asked before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch import arrays
from hpctrain.launch.arrays import Entry
from hpctrain.launch.output import runs, say
from hpctrain.launch.slurm import sbatch
from hpctrain.launch.slurm.queue import UnreachableError


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
                start = sbatch.expected_start(array.text(), group[0].config)
            except UnreachableError as error:
                say(f"not checked whether the jobs can start: {error}", style="yellow")
                self._checked.update(requests)  # the other requests would take as long
                return
            say(f"{runs(len(group))} like {group[0].run.name}: {start}")
