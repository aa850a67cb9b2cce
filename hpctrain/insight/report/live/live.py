"""`status --live [RUN]`: the nodes and GPUs of a run, live in the terminal.

digits-3fa92c1b
running  step 1200/5000  val/accuracy 0.97  ETA 4 min
node  device  use  memory  power  temp
n01   cores   75%  31%
      gpu_0   98%  78%     412 W  61 °C
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live

from hpctrain.base.terminal.console import Console, print_json
from hpctrain.base.units import duration
from hpctrain.commands.select import add_dir, all_runs, are_folders, latest_run, newest
from hpctrain.commands.state import UNDER_WAY
from hpctrain.errors import StorageError
from hpctrain.insight.report.live.snapshot import LiveSnapshot, snapshot
from hpctrain.insight.report.tree import Rows, Section, Sentences
from hpctrain.insight.report.views import terminal_view

_EVERY_S = 2.0
# The columns of a device: the values of which it has one, and their form.
_CELLS = {
    "use": ("{:.0f}%", "cpu_utilization_percentage", "utilization_percentage"),
    "memory": ("{:.0f}%", "memory_usage_percentage", "system_memory_usage_percentage"),
    "power": ("{:.0f} W", "power_usage_watts"),
    "temp": ("{:.0f} °C", "temperature_celsius"),
}


def main(argv: list[str]) -> int:
    """Show the run until it has ended, or once; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status --live",
        description="Show what the nodes and GPUs of a run do: their use, memory, power, "
        "temperature, and which node is slow. It reads only the run directory, so it works on a "
        "login node. Ctrl-C ends it; it ends with the run.",
    )
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="its directory, its name or the start of its name (default: the run that has shown "
        "progress last)",
    )
    add_dir(parser)
    parser.add_argument("--once", action="store_true", help="show it once, as into a file or pipe")
    parser.add_argument("--json", action="store_true", help="print JSON once, for programs")
    options = parser.parse_args(argv)
    run = _chosen(options.dir, options.run)
    console = Console()
    if options.json:
        print_json(snapshot(run).facts())
    elif options.once or not console.is_terminal:
        console.print(picture(snapshot(run)))
    else:
        _live(run, console)
    return 0


def _live(run: Path, console: Console) -> None:
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                seen = snapshot(run)
                live.update(picture(seen), refresh=True)
                if seen.state.name not in (*UNDER_WAY, "created", "lost"):  # it may come back
                    return
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        pass


def _chosen(folder: Path, name: str | None) -> Path:
    """Return the run that is named, or the one with the newest progress."""
    if name is not None and are_folders([name]):
        folder = Path(name)
    elif name is not None:
        return latest_run(folder, name, "status --live")
    runs = all_runs(folder, archived=False)
    if not runs:
        raise StorageError(f"{folder}: there is no run; --dir says where they are")
    return newest(runs)


def picture(seen: LiveSnapshot) -> RenderableType:
    """Return the run for a terminal; the notes come first, as its lower edge cuts the rest."""
    notes = [
        *filter(None, [seen.state.reason]),
        *(f"{node.name}: {note}" for node in seen.nodes for note in node.notes),
    ]
    if not seen.nodes:
        notes.append("no samples yet: the monitor of a node writes one every monitor.every_s")
    rows = [
        [node.name if device == "cores" else "", device, *_cells(values)]
        for node in seen.nodes
        for device, values in {"cores": node.metrics, **node.gpus}.items()
    ]
    sections: Sequence[Section] = [
        Sentences("", "", ["  ".join(_head(seen))]),
        Sentences("Notes", "", notes),
        Rows.of("", ["node", "device", *_CELLS], rows),
    ]
    return terminal_view.show(seen.run.name, sections, most=len(rows) + 20)


def _head(seen: LiveSnapshot) -> Iterator[str]:
    progress = seen.run.progress
    most, values = progress.max_steps, progress.metrics
    yield seen.state.name
    if progress.step is not None:
        yield f"step {progress.step}/{'?' if most is None else most}"
    for name in dict.fromkeys((progress.metric, "train/loss")):
        if name in values:
            yield f"{name} {values[name]:.4g}"
    if rate := values.get("perf/samples_per_s"):
        yield f"{rate:,.0f} samples/s"
    if seen.eta_s is not None:
        yield f"ETA {duration(seen.eta_s)}"


def _cells(values: Mapping[str, float]) -> Iterator[str]:
    for form, *names in _CELLS.values():
        yield next((form.format(values[name]) for name in names if name in values), "")
