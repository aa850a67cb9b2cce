"""`launch.gpu_type` at submission: the layout on each kind of GPU, or why a kind is refused."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.frozen import dump
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.entry import Entry
from hpctrain.launch.output import runs, say

_MOST = 8  # unlike configs that are looked at: each takes seconds
_DECIDING = ("model", "task", "data", "train", "parallel", "precision", "optimizer", "launch")


def check(entries: Sequence[Entry]) -> None:
    """Show what is chosen on each kind; a kind on which nothing fits is a ConfigError.

    To foresee it needs torch, which is not imported here: another process does.
    """
    unlike: dict[str, list[Entry]] = {}
    for entry in (entry for entry in entries if entry.config.launch.gpu_type):
        key = repr([getattr(entry.config, name) for name in _DECIDING])
        unlike.setdefault(key, []).append(entry)
    if not unlike:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpctrain.plan.by_kind"]
        for number, (first, *others) in enumerate([*unlike.values()][:_MOST]):
            path = Path(folder, f"{number}.yaml")
            path.write_text(dump(first.config))
            about = f"{runs(1 + len(others))} like {first.run.name}"
            command.append(json.dumps([about, str(path), *first.overrides]))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    if done.returncode not in (0, ConfigError.exit_code):
        raise LaunchError(f"launch.gpu_type: the layouts are not known: {done.stderr[-2000:]}")
    refused = said.pop() if done.returncode else ""
    for line in said:
        say(line)
    if refused:
        raise ConfigError(refused)
    if len(unlike) > _MOST:
        say(f"launch.gpu_type: {len(unlike) - _MOST} more kinds of runs were not looked at")
