"""`python -m hpctrain status --live [RUN]`: the nodes and GPUs of a run, live in the terminal.

It is a snapshot as text, for 80 columns or more: bars, sparklines and notes.

    digits-3fa92c1b  running  step 1200/5000  val/accuracy 0.97  ETA 00:04:10
    use                   last samples   memory         power  temp
    n01     cores    ███████▌···   75%     ▅▆▇▇▆▇▇█▇▇     ██···    31%
    gpu 0    █████████▊·   98%     ██████████     ████·    78%   412 W  61 °C
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from hpctrain.console import Cell, Console, Table, print_json
from hpctrain.errors import StorageError
from hpctrain.report.live.snapshot import Device, Node, Snapshot, snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.select import add_dir, all_runs, are_folders, latest_run, newest

_USE, _MEMORY = "utilization_percentage", "memory_usage_percentage"
_BAR, _SMALL_BAR, _SPARK = 11, 5, 12
_NAME = 16  # characters of a node's name; longer ones are shortened in the middle
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-~=+*#"  # for a terminal without these letters
_LINES_AROUND = 5  # lines that are no rows of devices


def main(argv: list[str]) -> int:
    """Show the run until it has ended, or once; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status --live",
        description="Show what the nodes and GPUs of a run do: their use now and in the last "
        "samples, memory, power, temperature, and which node is slow. It reads only the run "
        "directory, so it works on a login node. Ctrl-C ends it; it ends with the run.",
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
    parser.add_argument(
        "--every", type=_seconds, default=2.0, metavar="SECONDS", help="how often (default: 2)"
    )
    options = parser.parse_args(argv)
    run = _chosen(options.dir, options.run)
    console = Console()
    if options.json:
        print_json(snapshot(run).facts())
    elif options.once or not console.is_terminal:
        console.print(picture(snapshot(run), 10_000, _is_plain(console)))
    else:
        _live(run, console, options.every)
    return 0


def _live(run: RunDir, console: Console, every_s: float) -> None:
    plain = _is_plain(console)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                seen = snapshot(run)
                live.update(picture(seen, console.height, plain), refresh=True)
                if seen.state not in ("created", "queued", "running", "lost"):  # it may come back
                    return
                time.sleep(every_s)
    except KeyboardInterrupt:
        pass


def _chosen(folder: Path, name: str | None) -> RunDir:
    """Return the run that is named, or the one with the newest progress."""
    if name is not None and are_folders([name]):
        folder = Path(name)
    elif name is not None:
        return RunDir.open(latest_run(folder, name, "status --live"))
    runs = all_runs(folder, archived=False)
    if not runs:
        raise StorageError(f"{folder}: there is no run; --dir says where they are")
    return RunDir.open(newest(runs))


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.2 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.2 to 3600")
    return seconds


def picture(seen: Snapshot, height: int, plain: bool) -> Group:
    """Return the picture in `height` lines; a plain one has ASCII letters only.

    If the devices need more, the GPUs of a node share one line; what then does not fit is counted.
    """
    notes = [(seen.run.name, note) for note in seen.notes]
    notes += [(node.name, note) for node in seen.nodes for note in node.notes]
    room = max(1, height - _LINES_AROUND - min(len(notes), 4))
    together = sum(1 + len(node.gpus) for node in seen.nodes) > room
    table = Table(
        *("", "", "use", "", "last samples", "memory", "", "power", "temp"),
        right=(7, 8),
        first_out=(4, 5, 2),  # the bars, not the numbers beside them
        gap=1,
    )
    rows = [row for node in seen.nodes for row in _rows(node, together, plain)]
    for row in rows[:room]:
        table.add_row(*row)
    lines: list[Text] = []
    if len(rows) > room:
        lines.append(Text(f"{len(rows) - room} more lines (--json has all of them)"))
    lines += [Cell(f"{_shortened(name)}: {note}", "yellow") for name, note in notes[:4]]
    if len(notes) > 4:
        lines.append(Text(f"{len(notes) - 4} more notes (--json)", "yellow"))
    if not seen.nodes:
        lines.append(Text("no samples yet: the monitor of a node writes one every monitor.every_s"))
    return Group(_head(seen), *([table] if seen.nodes else []), *lines)


def _head(seen: Snapshot) -> Text:
    progress = seen.progress
    parts = [seen.run.name, seen.state]
    most, values = progress.max_steps, progress.metrics
    if progress.step is not None:
        parts.append(f"step {progress.step}/{'?' if most is None else most}")
    shown = [name for name in dict.fromkeys((progress.metric, "train/loss")) if name in values]
    parts += [f"{name} {values[name]:.4g}" for name in shown]
    if rate := values.get("perf/samples_per_s"):
        parts.append(f"{rate:,.0f} samples/s")
    if (left := progress.left_s) is not None and seen.state == "running":
        parts.append(f"ETA {time.strftime('%H:%M:%S', time.gmtime(min(left, 1e9)))}")
    if seen.slowest:
        parts.append(f"slowest: {seen.slowest}")
    return Cell("  ".join(parts), "bold")


def _rows(node: Node, together: bool, plain: bool) -> Iterable[list[Text]]:
    style = "yellow" if node.notes else ""
    name = Cell(_shortened(node.name), style)
    yield [name, *_cells(node.cores, "system_memory_usage_percentage", plain)]
    gpus = [_mean(node.gpus)] if together and len(node.gpus) > 1 else node.gpus
    for gpu in gpus:
        yield [Text(""), *_cells(gpu, _MEMORY, plain)]


def _cells(device: Device, memory: str, plain: bool) -> list[Text]:
    now = device.now
    use = now.get("cpu_utilization_percentage", now.get(_USE))
    watts, degrees = now.get("power_usage_watts"), now.get("temperature_celsius")
    hot = bool(now.get("throttled_by_heat"))
    return [
        Text(device.name),
        Text("" if use is None else _bar(use, _BAR, plain)),
        Text("" if use is None else f"{use:3.0f}%"),
        Text(_spark(device.use[-_SPARK:], plain)),
        Text("" if memory not in now else _bar(now[memory], _SMALL_BAR, plain)),
        Text("" if memory not in now else f"{now[memory]:3.0f}%"),
        Text("" if watts is None else f"{watts:.0f} W"),
        Text("" if degrees is None else f"{degrees:.0f} C" if plain else f"{degrees:.0f} °C")
        if not hot
        else Text(f"{degrees or math.nan:.0f} hot", "red"),
    ]


def _mean(gpus: Sequence[Device]) -> Device:
    """Return what stands for all GPUs of a node: the mean of each value, the sum of the power."""
    names = dict.fromkeys(name for gpu in gpus for name in gpu.now)
    values = {name: [gpu.now[name] for gpu in gpus if name in gpu.now] for name in names}
    now = {name: statistics.fmean(each) for name, each in values.items()}
    if "power_usage_watts" in values:
        now["power_usage_watts"] = sum(values["power_usage_watts"])
    if "throttled_by_heat" in values:
        now["throttled_by_heat"] = max(values["throttled_by_heat"])
    use = [
        statistics.fmean(each) for each in zip(*(gpu.use for gpu in gpus if gpu.use), strict=False)
    ]
    return Device(f"{len(gpus)} gpus", now, use)


def _bar(percent: float, width: int, plain: bool) -> str:
    """Return a bar of so many characters."""
    part = min(1.0, max(0.0, percent / 100)) * width
    if plain:
        return ("#" * round(part)).ljust(width, ".")
    whole = int(part)
    rest = _EIGHTHS[int(8 * (part - whole))].strip() if whole < width else ""
    return ("█" * whole + rest).ljust(width, "·")


def _spark(percents: Sequence[float], plain: bool) -> str:
    """Return one character for each value from 0 to 100."""
    levels = _PLAIN_LEVELS if plain else _LEVELS
    top = len(levels) - 1
    return "".join(levels[min(top, max(0, int(p / 100 * len(levels))))] for p in percents)


def _shortened(name: str) -> str:
    half = _NAME // 2 - 1
    return name if len(name) <= _NAME else f"{name[:half]}..{name[-half:]}"
