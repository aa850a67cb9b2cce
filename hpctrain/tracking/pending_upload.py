"""Whether all of a run is in MLflow, as far as its run directory says. No store is asked."""

import os
from pathlib import Path

from hpctrain.base.files.lock import is_locked
from hpctrain.errors import TrackingError
from hpctrain.tracking import samples
from hpctrain.tracking.journal import journal_path, read
from hpctrain.tracking.meta import Meta, Uploaded


def is_uploaded(run_dir: Path, meta: Meta) -> bool:
    """Return whether everything is in the store of `meta`, according to `uploaded.json`."""
    note = Uploaded.read(run_dir)
    if note is None or note.problem or note.files_stored < note.offset:
        return False
    if (note.uri, note.uid, note.parent_uid) != (meta.uri, meta.uid, meta.parent_uid):
        return False
    if read(journal_path(run_dir), note.offset, limit=1)[0]:
        return False
    return not any(samples.new(run_dir, note.samples))


def left_behind(run_dir: Path) -> str:
    """Return what is missing of a run that has ended, and the command that uploads it.

    It is "" if everything is in MLflow, an uploader is at work on this host, or the run is not
    uploaded by itself (`tracking.upload=false`).
    """
    uploading = journal_path(run_dir).with_name("upload.lock")
    try:
        if uploading.exists() and not os.access(uploading, os.R_OK):
            return ""  # another user's run, whose lock cannot be seen
        if is_uploaded(run_dir, Meta.read(run_dir)) or is_locked(uploading):
            return ""
    except (TrackingError, OSError):
        return ""  # not tracked, or not by hpctrain
    # The tracker has made this file when it started the uploader.
    if not journal_path(run_dir).with_name("uploader.log").exists():
        return ""
    return (
        "its uploader has ended, and not everything is in MLflow; "
        f"`python -m hpctrain status --upload {run_dir}` uploads the rest"
    )
