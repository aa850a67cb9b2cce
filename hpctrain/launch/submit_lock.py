"""One submission at a time into an output folder, whoever types it and wherever."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpctrain.errors import StorageError
from hpctrain.launch.table import say
from hpctrain.lock import file_lock

LOCK = ".submit.lock"


@contextmanager
def alone(folders: Iterable[Path]) -> Iterator[list[int]]:
    """Hold these folders, so that nobody submits the same runs in the same moment.

    Yields:
        The open lock files: a process that inherits them holds the folders until it ends.

    Raises:
        StorageError: a folder cannot be written.
    """
    said: set[Path] = set()

    def waiting(path: Path) -> None:
        if path not in said:
            said.add(path)
            say(f"another submission into {path.parent} is under way: waiting for it")
        time.sleep(0.2)

    with ExitStack() as stack:
        held = []
        # In one order, or two sweeps over several folders could wait for each other; and each once,
        # or a folder and a link to it would wait for themselves.
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
