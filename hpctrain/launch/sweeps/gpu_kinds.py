"""`launch.gpu_type` at submission: the layout on each kind of GPU, or why a kind is refused."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.frozen import dump, plain
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
        sections = (getattr(entry.config, name) for name in _DECIDING)
        key = json.dumps([each if isinstance(each, dict) else plain(each) for each in sections])
        unlike.setdefault(key, []).append(entry)
    groups = [*unlike.values()][:_MOST]
    if not groups:
        return
    with tempfile.TemporaryDirectory() as folder:
        asked = []
        for number, (first, *_) in enumerate(groups):
            path = Path(folder, f"{number}.yaml")
            path.write_text(dump(first.config))
            asked.append(json.dumps([str(path), *first.overrides]))
        command = [sys.executable, "-m", "hpctrain.plan.by_kind", *asked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"launch.gpu_type: the layouts are not known: {done.stderr[-2000:]}")
    for group, kinds in zip(groups, json.loads(done.stdout), strict=True):
        for kind, text, why in kinds:
            if not text:
                raise ConfigError(
                    f"launch.gpu_type={group[0].config.launch.gpu_type}: nothing fits on {kind} "
                    f"({why}); leave it out, or ask for more nodes [{group[0].run.name}]"
                )
            say(f"{runs(len(group))} like {group[0].run.name} on {kind}: {text}")
    if len(unlike) > _MOST:
        say(f"launch.gpu_type: {len(unlike) - _MOST} more kinds of runs were not looked at")
