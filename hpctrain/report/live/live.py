"""`python -m hpctrain top [RUN]`: the nodes and GPUs of a run, live in the terminal."""

import argparse
import math
import time
from pathlib import Path

from rich.live import Live

from hpctrain.console import Console, print_json
from hpctrain.errors import StorageError
from hpctrain.report.live.picture import picture
from hpctrain.report.live.snapshot import snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.select import add_dir, all_runs, are_folders, latest_run, newest


def main(argv: list[str]) -> int:
    """Show the run until it has ended, or once; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain top",
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
        return RunDir.open(latest_run(folder, name, "top"))
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
