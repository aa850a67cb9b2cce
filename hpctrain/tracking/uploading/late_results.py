"""Upload the results of evaluations that arrive when the training may have ended.

    python -m hpctrain.tracking.uploading.late_results RUN_DIR

If the run's own uploader is at work, it takes them along. It may also be about to end, so this
program waits until the results are in the store, or until it can upload them itself.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.secrets import mask_logging
from hpctrain.tracking import recorded
from hpctrain.tracking.meta import Uploaded
from hpctrain.tracking.uploading.upload import GaveUp, Upload, upload_lock

log = logging.getLogger(__name__)
_PAUSE_S = 0.5


def carry(run_dir: Path, wait_s: float) -> bool:
    """Return whether all recorded evaluations of a run are in the store.

    `wait_s` is for how many seconds to wait for another uploader, or for the store.
    """
    deadline = time.monotonic() + wait_s

    def pause(seconds: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise GaveUp
        time.sleep(min(seconds, left))

    def another_is_at_work() -> None:
        note = Uploaded.read(run_dir)
        if note is not None and recorded.steps(run_dir) <= {*note.evaluations}:
            raise _Done
        pause(_PAUSE_S)

    try:
        with upload_lock(run_dir, another_is_at_work):
            Upload(run_dir, pause).drain()
    except _Done:
        return True
    except GaveUp:
        return False
    return True


class _Done(Exception):
    """Another uploader has taken the results along."""


def main(argv: list[str]) -> int:
    """Upload; return 0 when everything is in the store."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tracking.uploading.late_results")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    mask_logging()
    try:
        if carry(options.run_dir, options.wait):
            return 0
    except HpctrainError as error:
        log.error("%s", error)
        return error.exit_code
    log.error("another uploader is at work, or the store does not answer")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
