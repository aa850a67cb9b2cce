"""The last word of a run: a short table and where to look next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.config.schema import Config
from hpctrain.runs.run_dir import RunDir
from hpctrain.secrets import mask, reference


def show(config: Config, run: RunDir, arguments: Sequence[str]) -> None:
    """Print a finished run's result and the commands that look further.

    Args:
        config: the run's.
        run: its directory.
        arguments: of the command line that asked for the run; empty inside a job.
    """
    result = run.read().get("result") or {}
    table = Table(show_header=False)
    table.add_row("run", Text(run.name))
    table.add_row("steps", f"{result.get('step', 0):,}")
    for name in ("val/accuracy", "val/loss", "train/loss"):
        if name in result:
            table.add_row(name, f"{result[name]:.4f}")
    if "perf/samples_per_s" in result:
        table.add_row("samples/s", f"{result['perf/samples_per_s']:,.0f}")
    table.add_row("run directory", Text(_short(run.path)))
    # Not wrapped: a path is there to be copied.
    console = Console(soft_wrap=True)
    console.print(table)
    console.print("look further:", highlight=False)
    if config.tracking.enabled:
        uri = mask(str(config.tracking.uri))
        if uri.startswith("sqlite:///"):
            print(f"  {_tool('mlflow')} ui --backend-store-uri {uri}")
        else:
            print(f"  {uri}")
    if arguments:
        command = f"{_tool('python')} -m hpctrain -m {shlex.join(map(reference, arguments))}"
        print(f"  {command} optimizer.lr=1e-3,3e-3   # a sweep on SLURM")


def _tool(name: str) -> str:
    """The name as it must be typed here: by path when an environment is not activated."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and Path(found).resolve() == beside.resolve():
        return name
    return _short(beside)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
