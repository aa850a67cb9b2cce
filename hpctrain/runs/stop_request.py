"""The wish that a run stops for good: the file `stop` in its directory.

    cancel ── stop {"by": …, "time": …} ── rank 0 sees it, or Slurm has killed the job: no requeue
    submitted or started anew by somebody ── the wish is over, and the file soon gone

A signal cannot say whether the job shall come back, reaches only jobs of one's own cluster and
host, and is lost on a job that Slurm requeues in the same moment; a file stands until it is
answered. So a restart by Slurm keeps it, and only a new start by a person takes it away.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hpctrain.disk import write_atomically


def stop_file(run: Path) -> Path:
    """Where the wish stands, in the run directory `run`."""
    return run / "stop"


def write(run: Path, by: str) -> None:
    """Ask this run to save, to stop and not to come back; `by` is who asks."""
    wish = {"by": by, "time": time.time()}
    write_atomically(stop_file(run), json.dumps(wish) + "\n", sync=False)


def read(run: Path, since: float = 0.0) -> dict[str, Any] | None:
    """Who asked, and when; None when nobody did. An empty file made by hand counts.

    Args:
        run: its directory.
        since: when it was last submitted: an older wish is over.
    """
    file = stop_file(run)
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    try:
        wish = json.loads(text)
    except ValueError:
        wish = None
    if not (isinstance(wish, dict) and {"by", "time"} <= wish.keys()):
        wish = {"by": "a file", "time": file.stat().st_mtime}
    return wish if wish["time"] >= since else None


def clear(run: Path) -> None:
    """What was wished is over."""
    stop_file(run).unlink(missing_ok=True)
