"""The uploader: a separate process that uploads a journal to MLflow; see `upload`.

    python -m hpctrain.tracking.uploading.uploader RUN_DIR

It follows the journal until the final status is uploaded, or until the process that writes the
journal has died; then it sets the status KILLED. A later attempt continues the same MLflow run.
Nothing is lost when the uploader is killed or the store is down: a restarted uploader continues
where the upload was, and failed requests are tried again.
"""

import argparse
import logging
import os
import select
import sys
import time
from pathlib import Path

from hpctrain.base.errors import TrackingError
from hpctrain.base.processes import child
from hpctrain.tracking.uploading.child_uploader import START_S
from hpctrain.tracking.uploading.upload import GaveUp, Upload, upload_lock

log = logging.getLogger(__name__)
_POLL_S = 2.0


class _Uploader:
    """Follows a journal: every two seconds, and at most `drain` seconds after the training.

    These seconds begin when MLflow has started and opened the store, if that is later.
    """

    def __init__(self, run_dir: Path, drain: float, uri: str | None = None) -> None:
        self._run_dir = run_dir
        self._drain = drain
        self._deadline: float | None = None
        self._stdin_open = True
        self._start_s = START_S if drain > 0 else 0.0  # is left for the start of MLflow
        self.upload = Upload(run_dir, self._pause, uri, self._connected)
        self._journal = self.upload.journal

    def run(self) -> None:
        """Return when all but artifacts is uploaded and the training process has ended."""
        with upload_lock(self._run_dir, lambda: self._pause(0.2)):
            while True:
                # Checked before `drain`: if it has died, `drain` uploads its last record.
                died = self._journal.writer_died
                self.upload.drain()
                if self._journal.ended or not self._journal.writer_here:
                    return
                if died and self._journal.writer_died:
                    self.upload.close_killed()
                    return
                if not died:
                    self._nap(_POLL_S)

    def _pause(self, seconds: float) -> None:
        if self._deadline is None and (not self._stdin_open or self._journal.writer_died):
            self._deadline = time.monotonic() + self._start_s + self._drain
        if self._deadline is None:
            self._nap(seconds)
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise GaveUp
        # Not longer, so that a store which is back is seen, and a last try at the deadline.
        time.sleep(min(seconds, left, self._drain / 5))

    def _connected(self) -> None:
        self._start_s, self._deadline = 0.0, None
        os.dup2(2, 1)  # ends the pipe to the training

    def _nap(self, seconds: float) -> None:
        """Sleep, but wake up when the training closes our stdin: it finishes or has died."""
        if not self._stdin_open:
            time.sleep(min(seconds, 0.2))
        elif select.select([sys.stdin], [], [], seconds)[0]:
            self._stdin_open = bool(os.read(sys.stdin.fileno(), 1))


def main(argv: list[str]) -> int:
    """Run the uploader; return 0 when everything is in the store."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tracking.uploading.uploader")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--drain", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--uri", help="the store, which the tracker knows from its config")
    options = parser.parse_args(argv)
    child.begin()
    log.info("uploader %d of %s", os.getpid(), options.run_dir)
    try:
        uploader = _Uploader(options.run_dir, options.drain, options.uri)
        uploader.run()
    except GaveUp:
        log.error(
            "gave up; `python -m hpctrain status --upload %s` uploads the rest", options.run_dir
        )
        return 1
    except TrackingError as error:
        log.error("%s", error)
        return error.exit_code
    except Exception:
        log.exception("the uploader failed")
        return 1
    if left := uploader.upload.left:
        log.error("%s; `python -m hpctrain status --upload %s` tries again", left, options.run_dir)
        return 1
    log.info("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
