"""The committed checkpoints of a run: how one takes its place, and which of them stay.

    step-00000200.tmp    all its files are there ── renamed ── step-00000200
    step-00000200        was there already: damaged, or the last step of the run is saved again
                         ── renamed before ── step-00000200.old ── removed after

Whenever the process is killed, one of the two is whole. `put_back` is for what is left then.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Thread

from hpctrain.base.files.disk import sync
from hpctrain.base.names.step_names import step_name
from hpctrain.runs.checkpoints import manifest


class Committed:
    """The checkpoints in `folder`; which of them stay, `Checkpointer` tells.

    Attributes:
        damaged: Those that rank 0 has found damaged; they do not count, and stay.
        in_background: Whether they are removed while the training goes on.
    """

    def __init__(self, folder: Path, keep: int, kept: Callable[[], Collection[int]]) -> None:
        self.folder, self.damaged, self.in_background = folder, set[Path](), False
        self._keep, self._kept = keep, kept
        self._removing = list[Thread]()

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, whether it exists or not."""
        return self.folder / step_name(step)

    def take(self, unfinished: Path) -> None:
        """Rename a folder whose files are all there; nothing is left to do if that was done."""
        final, old = unfinished.with_suffix(""), unfinished.with_suffix(manifest.OLD)
        if unfinished.is_dir():
            if final.is_dir():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            unfinished.rename(final)
        self.damaged.discard(final)
        sync(self.folder)
        if old.exists():
            self._remove(old)

    def remove_old(self, best: int) -> None:
        """Remove what need not stay; `best` is the step of the best one."""
        healthy = manifest.newest_healthy(self.folder, self.damaged.__contains__)
        kept = {healthy, self.path(best), *map(self.path, self._kept())}
        found = [path for path in manifest.checkpoints(self.folder) if path not in self.damaged]
        for path in found[self._keep :]:
            if path in kept:
                continue
            # Renamed first, since a half-removed folder must not look like a checkpoint.
            self._remove(path.rename(path.with_suffix(".tmp")))

    def end_removing(self) -> None:
        """Wait until all is removed."""
        while self._removing:
            self._removing.pop().join()

    def _remove(self, doomed: Path) -> None:
        if not self.in_background:
            shutil.rmtree(doomed)
        else:  # a slow file system must not stop the training
            self._removing.append(Thread(target=shutil.rmtree, args=(doomed, True)))
            self._removing[-1].start()
