"""`python -m hpctrain status --upload [RUN_DIR...]`: upload to MLflow what the uploader has not."""

import argparse
import dataclasses
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

from hpctrain.base.errors import TrackingError
from hpctrain.base.files.disk import open_regular
from hpctrain.base.terminal.terminal import printable
from hpctrain.commands.state import ended_for_good
from hpctrain.tracking import final_status
from hpctrain.tracking.journal import journal_path
from hpctrain.tracking.meta import Meta, check_known, is_uploaded
from hpctrain.tracking.store import check_uri, resolve_uri
from hpctrain.tracking.uploading.upload import GaveUp, Upload, upload_lock

_DONE, _AT_WORK = "nothing to do", "its own uploader is at work"
_PATIENCE = 60.0  # seconds of pauses per run while the store does not answer


def main(argv: list[str]) -> int:
    """Upload the journals of the run directories; of all under `runs/` if none is given.

    The scheduler is asked about runs that have recorded no end. What cannot be uploaded is a
    TrackingError at the end.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status --upload",
        description="Upload the params, metrics and tags of runs that are not in MLflow yet.",
    )
    parser.add_argument(
        "run_dir", nargs="*", type=Path, help="a run, or a folder of runs (default: runs)"
    )
    parser.add_argument(
        "--uri", help="upload to this store, now and later, instead of the store of the run"
    )
    options = parser.parse_args(argv)
    uri = options.uri and resolve_uri(options.uri, Path.cwd())

    named = (run for given in options.run_dir for run in _find_runs(given) or [given])
    run_dirs = [*named] if options.run_dir else _find_runs(Path("runs"))
    if not run_dirs:
        raise TrackingError("no run directory named, and none under runs/")
    if unclear := [path for path in run_dirs if final_status.is_open(path)]:
        for path, (status, reason) in ended_for_good(unclear).items():
            final_status.close(path, status, reason)
    return sync(run_dirs, uri)


def _check_journal(path: Path) -> None:
    """Check that a journal can be read, as it would look empty. TrackingError: it cannot."""
    try:
        open_regular(path, parts=2).close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise TrackingError(f"{path}: {error.strerror}") from None


def _find_runs(root: Path) -> list[Path]:
    """Return `root` if it is a run directory that has a journal, or those that are in it."""
    places = (root, *sorted(root.glob("*")))
    found = [place for place in places if (place / "journal" / "meta.json").is_file()]
    return found[:1] if found[:1] == [root] else found


def sync(run_dirs: Iterable[Path], uri: str | None = None) -> int:
    """Upload what is missing in the store, print one line per run, and return the exit code 0.

    `uri` is the store to use, now and later, instead of the one in `meta.json`: an absolute path or
    a server. A TrackingError is raised when all are done.
    """
    if uri:
        check_uri(uri)
    failed = []
    for run_dir in run_dirs:
        try:
            meta = Meta.read(run_dir)
            _check_journal(journal_path(run_dir))
            if not uri:
                check_known(meta, run_dir)
            elif uri != meta.uri:
                meta = dataclasses.replace(meta, uri=uri)
                try:
                    meta.write(run_dir)
                except OSError as error:
                    raise TrackingError(f"the run cannot be written: {error}") from error
            done = not final_status.has_died_here(run_dir) and is_uploaded(run_dir, meta)
            outcome = _DONE if done else _upload(run_dir, meta, uri)
            print(printable(f"{run_dir}: {outcome}"), flush=True)
        except TrackingError as error:
            print(printable(f"{run_dir}: {error}"), file=sys.stderr, flush=True)
            failed.append(run_dir)
    if failed:
        names = " ".join(map(str, failed))
        raise TrackingError(f"not everything is uploaded; what is missing stays in {names}")
    return 0


def _upload(run_dir: Path, meta: Meta, uri: str | None) -> str:
    check_uri(meta.uri)
    # The warnings of mlflow do not help the user here.
    warnings.simplefilter("ignore")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    logging.getLogger("alembic").setLevel(logging.ERROR)
    spent = 0.0

    def pause(seconds: float) -> None:
        nonlocal spent
        spent += seconds
        if spent > _PATIENCE:
            raise GaveUp
        time.sleep(seconds)

    def busy() -> None:
        raise _Busy

    try:
        with upload_lock(run_dir, busy):
            upload = Upload(run_dir, pause, uri)
            upload.drain()
            note = ""
            if upload.journal.writer_died:
                final_status.close(run_dir, "KILLED", final_status.UNRECORDED)
                upload.drain()
                note = "; its process is gone, so it is KILLED"
    except _Busy:
        return _AT_WORK
    except GaveUp as error:
        raise TrackingError(f"{meta.uri} does not answer: {error.__context__}") from error
    except Exception as error:
        # An error of MLflow or of the file system; any other is a bug in hpctrain.
        if isinstance(error, OSError) or hasattr(error, "error_code"):
            text = " ".join(str(error).partition("[SQL:")[0].split())[:500]
            raise TrackingError(f"{meta.uri}: {text or type(error).__name__}") from error
        raise
    done = f"{upload.points} points uploaded to {meta.uri}{note}"
    if upload.left:
        raise TrackingError(f"{done}; {upload.left}")
    return done


class _Busy(Exception):
    """Another uploader holds the upload lock of this run."""
