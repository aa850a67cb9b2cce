"""`status --live [RUN]`: the nodes and GPUs of a run, live in the terminal.

digits-3fa92c1b
running  step 1200/5000  val/accuracy 0.97  ETA 4 min
node  device  use  memory  power  temp
n01   cores   75%  31%
      gpu_0   98%  78%     412 W  61 °C

    monitor/NODE.jsonl ── the last sample ── Node ── the notes: slow, silent, idle
    progress.json, run.json ─────────────────────── _LiveSnapshot

Nothing but files of the run directory is read; no node and no scheduler is asked.
"""

import argparse
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.live import Live

from hpctrain.base.errors import StorageError
from hpctrain.base.terminal.console import Console, print_json
from hpctrain.base.units import duration
from hpctrain.commands.facts import Facts
from hpctrain.commands.select import add_dir, all_runs, are_folders, latest_run, newest
from hpctrain.commands.state import UNDER_WAY, State, eta_s, state_of
from hpctrain.config.frozen import load
from hpctrain.insight.report.tree import Rows, Section, Sentences
from hpctrain.insight.report.views import terminal_view
from hpctrain.runs.run_dir import RunDir
from hpctrain.tracking import samples

_EVERY_S = 2.0
_TAIL = 256 * 1024  # bytes of a file of samples that are read
_SILENT = 3.0  # intervals without a sample
# The columns of a device: the values of which it has one, and their form.
_CELLS = {
    "use": ("{:.0f}%", "cpu_utilization_percentage", "utilization_percentage"),
    "memory": ("{:.0f}%", "memory_usage_percentage", "system_memory_usage_percentage"),
    "power": ("{:.0f} W", "power_usage_watts"),
    "temp": ("{:.0f} °C", "temperature_celsius"),
}


@dataclass
class Node:
    """A node of the run."""

    name: str
    age_s: float  # since its last sample
    metrics: dict[str, float]  # of the last sample
    notes: list[str] = field(default_factory=list)  # what is wrong with it, in words

    @property
    def gpus(self) -> dict[str, dict[str, float]]:
        """The metrics of each GPU, without its name."""
        found: dict[str, dict[str, float]] = {}
        for match in filter(None, map(samples.GPU.fullmatch, self.metrics)):
            found.setdefault(match[1], {})[match[2]] = self.metrics[match[0]]
        return found


@dataclass
class _LiveSnapshot:
    """A run at a moment."""

    run: Facts
    state: State  # as far as the run directory tells it
    eta_s: float | None  # None if nothing can be forecast
    nodes: list[Node]  # of the newest attempt, those with notes first

    def facts(self) -> dict[str, Any]:
        """Return everything for `--json`."""
        progress = self.run.progress
        return {
            "run": str(self.run.path),
            "state": self.state.name,
            "reason": self.state.reason,
            "step": progress.step,
            "max_steps": progress.max_steps,
            "eta_s": self.eta_s,
            "metrics": progress.metrics,
            "nodes": [asdict(node) for node in self.nodes],
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


def snapshot(path: Path, now: float | None = None) -> _LiveSnapshot:
    """Read a run directory; `now` is in seconds since the epoch."""
    now, run = time.time() if now is None else now, Facts.read(path)
    run.held = RunDir(path).is_locked()
    state, begun = state_of(run, now), run.attempt.started
    read = [_node(path, name, now) for name, path in samples.files(path).items()]
    # A node of an attempt before is not a part of the run any more.
    nodes = [node for node in read if node is not None and now - node.age_s >= begun]
    _look_at_gpus(nodes)
    if state.name == "running":
        every_s = _config(path / "config.yaml").monitor.every_s
        for node in nodes:
            if node.age_s > _SILENT * every_s + 5.0:
                node.notes.append(f"silent: no sample for {node.age_s:.0f} s")
    idle = samples.idle(path)
    for node in nodes:
        when, text = idle.get(node.name, (0.0, ""))
        if text and when >= begun:
            node.notes.append(f"idle: {text}")
    nodes.sort(key=lambda node: (not node.notes, node.name))
    left = eta_s(run, now) if state.name == "running" else None
    return _LiveSnapshot(run, state, left, nodes)


_config = functools.lru_cache(maxsize=4)(load)  # it takes as long as all the rest


def _node(path: Path, name: str, now: float) -> Node | None:
    begin = max(0, path.stat().st_size - _TAIL)
    found = [sample for sample in samples.read(path, begin) if sample.metrics]
    return Node(name, max(0.0, now - found[-1].time), dict(found[-1].metrics)) if found else None


def _look_at_gpus(nodes: Sequence[Node]) -> None:
    """Note what is wrong with the GPUs of a node."""
    for node, name, gpu in ((one, *each) for one in nodes for each in one.gpus.items()):
        if gpu.get("throttled_by_heat"):
            node.notes.append(f"slow: {name} is too hot, its clock is lowered")
        if gpu.get("ecc_uncorrected_errors"):
            node.notes.append(f"{name} has memory errors that could not be corrected")


def picture(seen: _LiveSnapshot) -> RenderableType:
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


def _head(seen: _LiveSnapshot) -> Iterator[str]:
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
