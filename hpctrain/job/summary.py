"""The summary at the end of a run: a short table, and commands to look further."""

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.console import Console, Table
from hpctrain.errors import TrackingError
from hpctrain.runs.chosen_checkpoint import best_of
from hpctrain.runs.run_dir import RunDir
from hpctrain.secrets import mask
from hpctrain.tracking.page.links import known_pages

_SHOWN = ("val/accuracy", "val/bits_per_byte", "val/loss", "train/loss")


def show(config: Config, run: RunDir) -> None:
    """Print the result of a finished run, the main metric first, and where to look further."""
    tracking = config.tracking
    record = run.read()
    result = record.result or {}
    table = Table("", "")
    table.add_row("run", run.name)
    table.add_row("steps", f"{result.get('step', 0):,}")
    for name in dict.fromkeys((config.metric, *_SHOWN)):
        if name in result:
            table.add_row(name, _number(result[name]))
    if best := best_of(run.path, record):
        text = f"{_number(best.value)} at step {best.step:,} (its checkpoint is kept)"
        table.add_row(f"best {best.metric}", text)
    if "perf/samples_per_s" in result:
        table.add_row("samples/s", f"{result['perf/samples_per_s']:,.0f}")
    table.add_row("run directory", _short(run.path))
    console = Console()
    console.print(table)
    if wrong := record.attempt.reason:
        style = "red" if "not finite" in wrong else "green"
        console.print(wrong, style=style, highlight=False, markup=False)
    for text in record.noted():
        console.print(text, style="yellow", highlight=False, markup=False)
    console.print("look further:", highlight=False)
    if tracking.enabled:
        uri = mask(str(tracking.uri))
        if uri.startswith("sqlite:///"):
            print(f"  {_tool('mlflow')} ui --backend-store-uri {uri}")
        pages = pages_of(run.path)
        for page in pages:
            print(f"  {page}")
        if not pages and not uri.startswith("sqlite:///"):
            print(f"  {uri}")
    if "val/bits_per_byte" in result:  # a language model has this metric
        run_path = shlex.quote(_short(run.path))
        print(f"  {_tool('python')} -m hpctrain predict {run_path} --prompt 'def '")


def pages_of(run: Path) -> tuple[str, ...]:
    """Return the pages of a run and of its experiment in MLflow; none if it is not there yet."""
    with suppress(TrackingError):
        return known_pages(run) or ()
    return ()


def _number(value: float) -> str:
    """Return the value with four decimals; a small one with four digits, so that it is not 0."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4g}"


def _tool(name: str) -> str:
    """Return how a program of this environment can be called: by name, or by path."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and Path(found).resolve() == beside.resolve():
        return name
    return _short(beside)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
