"""The log of a rank that was started in a terminal: a file of its own for each attempt.

    RUN/logs/terminal_2.rank0.log     the second attempt in a terminal, rank 0

It has the log lines of the process and the error that it ends with. `hpctrain logs` shows it. Ranks
under Slurm and under submitit's local executor need none: all that they print goes to a file.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


def keep(folder: Path, launcher: str, rank: int) -> None:
    """Write the log lines of this process into a new file from now on, if nobody else keeps them.

    Args:
        folder: `RUN/logs`.
        launcher: What has started this process; see `distributed.ranks`.
        rank: The rank of this process.
    """
    if launcher not in ("single", "torchrun"):
        return
    for number in itertools.count(1):
        path = folder / f"terminal_{number}.rank{rank}.log"
        try:
            handler = _File(path)
        except FileExistsError:
            continue
        except OSError as error:
            log.warning("%s: %s; the log is only in this terminal", path, error.strerror)
            return
        root = logging.getLogger()
        # As in the terminal, with secrets masked.
        handler.setFormatter(root.handlers[0].formatter if root.handlers else None)
        root.addHandler(handler)
        return


def write(text: str) -> None:
    """Append to the file of this process, if there is one, what only the terminal would show."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _File) and handler.stream:
            with suppress(OSError):
                handler.stream.write(text)
                handler.flush()


class _File(logging.FileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, mode="x", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a disk that is full: the terminal has the line."""
