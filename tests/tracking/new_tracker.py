"""A tracker for tests of tracking, and the command that uploads what it has written."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.tracking.meta import Meta
from hpctrain.tracking.tracker import JournalTracker

SYNC = [sys.executable, "-m", "tests.tracking.sync_runs"]


def new_tracker(run_dir: Path, store: Path | str, **options: Any) -> JournalTracker:
    """Return a tracker of a run in the experiment `exp`, which does not upload by itself."""
    uri = f"sqlite:///{store}" if isinstance(store, Path) else store
    known = {"experiment": "exp", "run_name": "n", "uid": run_dir.name, "upload": False, **options}
    facts = {each.name: known.pop(each.name) for each in fields(Meta) if each.name in known}
    return JournalTracker(run_dir, Meta(uri, **facts), **known)
