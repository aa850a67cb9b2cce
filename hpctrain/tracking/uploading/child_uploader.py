"""The uploader of a training: a process that the tracker starts, keeps running, and waits for.

    start ── the training goes on, the uploader reads the journal ── wait, at most `drain` seconds
               └── revive, when a signal has killed it

Its standard input is a pipe that this process holds: the uploader ends after it is closed. Its
standard output ends when it has reached the store; before that, the `drain` seconds do not count,
since MLflow can take longer to start than a short attempt trains.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.base.processes.child import Child
from hpctrain.tracking.journal import journal_path
from hpctrain.tracking.meta import Uploaded

log = logging.getLogger(__name__)

_RESTARTS = 5  # at most so many restarts of a killed uploader
START_S = 60.0  # at most so long it may take to import mlflow and to open the store
_SILENT_S = 1.0  # a shorter wait for the uploader is not worth a line


class ChildUploader:
    """The uploader process of one attempt, for whose end `wait` waits `drain` seconds.

    `run_dir` is absolute. `process` is None before `start`, and if it could not be started.
    """

    def __init__(self, run_dir: Path, uri: str, drain: float) -> None:
        self._run_dir, self._uri, self._drain = run_dir, uri, drain
        self._journal = journal_path(run_dir)
        self.process: Child | None = None

    def start(self) -> None:
        """Start the process; a failure is a warning, and `sync` uploads later."""
        try:
            self.process = Child(
                "hpctrain.tracking.uploading.uploader",
                *(str(self._run_dir), f"--drain={self._drain}", f"--uri={self._uri}"),
                cwd=self._journal.parent,
                log_file=self._log_path,
                tells=True,
            )
        except OSError as error:
            log.warning(
                "the uploader cannot be started: %s; `hpctrain status --upload` uploads later",
                error,
            )

    def revive(self) -> None:
        """Start the process again if a signal has killed it."""
        if self.process:
            self.process.revive(_RESTARTS)

    def wait(self) -> None:
        """Wait until the process has uploaded everything, and say what is left; SIGINT ends it."""
        uploader = self.process
        if uploader is None:
            return
        uploader.close_input()  # which wakes it
        began, told, connected = time.monotonic(), False, self._drain <= 0
        with _noting_signals() as signals:
            while uploader.code is None and not signals:
                if not connected and uploader.has_told:
                    began, connected = time.monotonic(), True
                waited = time.monotonic() - began
                if waited > self._drain + (0 if connected else START_S):
                    break
                if waited > _SILENT_S and not told:
                    told = True
                    log.info(
                        "waiting up to %g s until everything is in MLflow (tracking.drain_s, "
                        "counted from the start of MLflow; Ctrl-C ends the wait)",
                        self._drain,
                    )
                time.sleep(0.02)
        uploader.release()
        code = uploader.code
        if code == 0:
            return
        note, goes_on = Uploaded.read(self._run_dir), ""
        if note is not None and note.problem:
            why = note.problem
        elif code is None:
            why = signals[0] if signals else f"after tracking.drain_s={self._drain:g}"
            of_job = " until Slurm ends the processes of this job" * ("SLURM_JOB_ID" in os.environ)
            goes_on = f"the uploader goes on{of_job}, and "
        else:
            why = f"the uploader ended with {code}, see {self._log_path}"
        log.log(
            logging.INFO if goes_on else logging.WARNING,
            "not everything is in MLflow yet (%s); %snothing is lost: `python -m hpctrain status "
            "--upload %s` uploads the rest",
            *(why, goes_on, self._run_dir),
        )

    @property
    def _log_path(self) -> Path:
        return self._journal.with_name("uploader.log")


@contextmanager
def _noting_signals() -> Iterator[list[str]]:
    """Yield a list that gets the names of SIGINT and SIGTERM as they arrive.

    During the training `faults.stop` handles them, which would end the process at a second Ctrl-C.
    """
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    wakeup = signal.set_wakeup_fd(-1)
    handlers = {
        number: signal.signal(number, lambda n, _: noted.append(signal.Signals(n).name))
        for number in numbers
    }
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
