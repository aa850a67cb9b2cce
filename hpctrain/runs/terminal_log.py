"""The log of a rank that was started in a terminal: a file of its own for each attempt.

    RUN/logs/terminal_2.rank0.log     the second attempt in a terminal, rank 0

It has the log lines of the process and the error that ends the attempt; `hpctrain logs` shows it.
Ranks under Slurm and under submitit's local executor have a file for all that they print; those of
a worker, whose file is not that of the run, have both.
"""

import itertools
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.base.errors import HpctrainError
from hpctrain.base.secrets import mask
from hpctrain.cluster.ranks.ranks import RankInfo

log = logging.getLogger(__name__)


@contextmanager
def kept(folder: Path, ranks: RankInfo) -> Iterator[None]:
    """Write the log lines of the context, and an exception that leaves it, into a new file."""
    has_none = ranks.worker or ranks.launcher in ("single", "torchrun")
    handler = _open(folder, ranks.rank) if has_none else None
    if handler is None:
        yield
        return
    root = logging.getLogger()
    # As in the terminal, with secrets masked.
    handler.setFormatter(root.handlers[0].formatter if root.handlers else None)
    root.addHandler(handler)
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        ours = isinstance(error, HpctrainError)
        handler.write(f"error: {error}\n" if ours else traceback.format_exc())
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


class _File(logging.FileHandler):
    def write(self, text: str) -> None:
        assert self.stream is not None  # the log is still open
        with suppress(OSError):
            self.stream.write(mask(text))
            self.flush()

    def close(self) -> None:
        """Close the file, also on a full disk."""
        with suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk: the terminal has the line."""


def _open(folder: Path, rank: int) -> _File | None:
    for number in itertools.count(1):
        path = folder / f"terminal_{number}.rank{rank}.log"
        try:
            folder.mkdir(exist_ok=True)
            path.touch(exist_ok=False)
            # The observer of the ranks appends to it, too.
            return _File(path, mode="a", encoding="utf-8", errors="backslashreplace")
        except FileExistsError:
            continue
        except OSError as error:
            log.warning("%s: %s; the log is only in this terminal", path, error.strerror)
            break
    return None
