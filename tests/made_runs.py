"""Run directories that are made by hand, for tests of what commands say about them."""

import json
import os
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from hpctrain.base.files.record import convert
from hpctrain.base.names.run_record import Progress, RunRecord
from hpctrain.commands import status
from hpctrain.commands.facts import Facts
from hpctrain.runs.checkpoints.manifest import Manifest
from hpctrain.runs.state.stop_request import StopRequest

NOW = 1_800_000_000.0
SUBMITTED = {"script": "/s/job.sh", "task": 0, "user": "me", "time": NOW - 1000}
ATTEMPT = {"started": NOW - 900, "launcher": "slurm", "host": "node1", "job_id": "7_0"}
SAVED = ATTEMPT | {"ended": NOW - 100, "step": 40, "reason": "SIGTERM", "state": "interrupted"}
RAISED = ATTEMPT | {"ended": NOW - 100, "error": "ValueError:\n two  lines"}
FAST = {"step_s": 0.5, "longest_step_s": 20.0, "doing": "an evaluation"}
SLOW = {"step_s": 45.0, "longest_step_s": 400.0, "doing": "an evaluation"}
BEAT = {"step": 50, "max_steps": 100, "time": NOW - 3, "stepped": NOW - 3, "steps_per_s": 2.0}
REQUEST = {"by": "ann", "time": NOW - 10}


def facts_of(
    path: Path,
    record: dict[str, Any],
    progress: dict[str, Any] | None = None,
    stop_request: dict[str, Any] | None = None,
    **more: Any,
) -> Facts:
    asked = stop_request and convert(StopRequest, stop_request, "stop")
    told = convert(Progress, progress or {}, "progress.json")
    return Facts(path, convert(RunRecord, record, "run.json"), told, asked or None, **more)


def make_run(folder: Path, name: str = "digits-00000001", **record: Any) -> Path:
    run = folder / name
    (run / "logs").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "config.yaml").touch()
    content = {"uid": name, "state": "created", "attempts": []} | record
    (run / "run.json").write_text(json.dumps(content))
    return run


def make_sweep(folder: Path, stamp: str, run_dirs: list[Path]) -> Path:
    sweep = folder / "sweeps" / stamp
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps([{"run": str(run)} for run in run_dirs]))
    return sweep


def make_checkpoint(run: Path, step: int, *, whole: bool = True) -> Path:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir()
    (folder / "__0_0.distcp").write_text("12345")
    files = {"__0_0.distcp": {"bytes": 5 if whole else 6, "xxh3_128": ""}}
    Manifest(step, 1, {}, files, NOW, {}).write(folder)
    return folder


def old(path: Path, text: str = "x") -> Path:
    """Write a file that was last changed 30 days ago; its folder gets the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for place in (path, path.parent):
        os.utime(place, (time.time() - 30 * 86400,) * 2)
    return path


def status_json(folder: Path, *arguments: str) -> Any:
    """Return what `hpctrain status --json` prints, called in this process."""
    with redirect_stdout(StringIO()) as said:
        assert status.main(["--dir", str(folder), "--json", *arguments]) == 0
    return json.loads(said.getvalue())
