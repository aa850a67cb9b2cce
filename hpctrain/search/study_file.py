"""The file of a search's study: Optuna's journal, under a lock that ends with its holder.

Optuna's own lock is a link. When its holder is killed, the link stays and blocks the search for
30 s. And a record that was not written to its end, as by a kill or on a full disk, would make the
study unreadable for ever, because the next record goes to the same line.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from hpctrain.base.files.lock import file_lock

log = logging.getLogger(__name__)
_NAP_S = 0.01


def study_storage(file: Path, wait: Callable[[float], None] = time.sleep) -> JournalStorage:
    """Return the storage of the study in `file`, which is created if it does not exist.

    `wait` sleeps for some seconds while another process has its lock, or raises to give up.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(file), _Lock(file, wait)))


class _Lock(JournalFileSymlinkLock):
    """Who holds it may append to the file, whose last line is then whole."""

    def __init__(self, file: Path, wait: Callable[[float], None] = time.sleep) -> None:
        super().__init__(str(file))
        self._file, self._wait, self._held = file, wait, ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock."""
        lock = self._file.with_name(f"{self._file.name}.flock")
        self._held.enter_context(file_lock(lock, lambda: self._wait(_NAP_S)))
        with open(self._file, "r+b") as journal:
            size = journal.seek(0, os.SEEK_END)
            journal.seek(max(0, size - 1))
            if journal.read() not in (b"", b"\n"):
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)
                log.warning(
                    "%s: its last record was not written to its end, and is taken out", self._file
                )
        return True

    def release(self) -> None:
        """Let others append."""
        self._held.close()
