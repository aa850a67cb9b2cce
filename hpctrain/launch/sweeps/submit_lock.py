"""The submit lock: one submission at a time into an output folder, for all users and hosts."""

import functools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpctrain.base.errors import StorageError
from hpctrain.base.files.lock import file_lock
from hpctrain.base.terminal.console import say

LOCK = ".submit.lock"


@contextmanager
def submit_lock(folders: Iterable[Path]) -> Iterator[list[int]]:
    """Hold the submit locks of these folders, so that no run is submitted twice.

    It yields their file descriptors. A process that inherits them holds the locks until it ends.
    """
    announced: set[Path] = set()

    def waiting(path: Path) -> None:
        if path not in announced:
            announced.add(path)
            say(f"another submission into {path.parent} is under way: waiting for it")
        time.sleep(0.2)

    with ExitStack() as stack:
        held = []
        # Sorted, so that two sweeps over several folders cannot wait for each other. Without links,
        # so that the lock of one folder is not taken twice.
        for folder in sorted({Path(os.path.realpath(folder)) for folder in folders}):
            path = folder / LOCK
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = file_lock(path, functools.partial(waiting, path))
                held.append(stack.enter_context(lock))
            except OSError as error:
                raise StorageError(
                    f"output_dir={folder}: cannot write {path} ({error.strerror})"
                ) from error
        yield held
