"""The summary at the end of a run: a short table, and where to look further."""

import os
from pathlib import Path

from hpctrain.base.secrets import mask
from hpctrain.base.terminal.console import Console, Table
from hpctrain.config.schema import TrackingConfig
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking.links import pages_of

_SHOWN = ("val/accuracy", "val/bits_per_byte", "val/loss", "train/loss")


def show(run: RunDir, metric: str, tracking: TrackingConfig) -> None:
    """Print the result of a finished run, `metric` first, and its pages in MLflow."""
    record = run.read()
    result = record.result or {}
    table = Table("", "")
    table.add_row("run", run.name)
    table.add_row("steps", f"{result.get('step', 0):,}")
    for name in dict.fromkeys((metric, *_SHOWN)):
        if name in result:
            table.add_row(name, _number(result[name]))
    if best := record.best:
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
    if tracking.enabled:
        console.print("look further:", highlight=False)
        uri, pages = mask(str(tracking.uri)), pages_of(run.path)
        local = uri.startswith("sqlite:///")
        served = [f"mlflow ui --backend-store-uri {uri}"] if local else [uri] * (not pages)
        for line in (*served, *pages):
            print(f"  {line}")


def _number(value: float) -> str:
    """Return the value with four decimals; a small one with four digits, so that it is not 0."""
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.4g}"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
