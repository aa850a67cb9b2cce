"""`python -m hpctrain status [RUN|SWEEP...]`: a table of runs, or how a search stands."""

import argparse
import time
from typing import Any

from rich.console import Group

from hpctrain.base import offered
from hpctrain.base.terminal.console import Cell, Console, print_json
from hpctrain.cluster.slurm.patience import WATCH_S, watching
from hpctrain.commands.run_table import Row, problems, table
from hpctrain.commands.select import add_arguments, is_search, one_sweep, select
from hpctrain.commands.state import STATES, UNDER_WAY, states_of

_ROWS, _TRIALS = 40, 20


def main(argv: list[str]) -> int:
    """Print the table, once or with --watch again and again; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status",
        description="Show a table of runs, those that run first and then the newest: swept values, "
        "state and reason, node, restarts, time of all attempts, step, time left, the last and the "
        "best value of the main metric. The start of a name shows all runs whose names begin so. "
        "It reads the run directories, calls squeue, and calls sacct if a job has left the "
        "queue.",
        epilog="States: " + ", ".join(STATES),
    )
    add_arguments(parser, "default: all")
    parser.add_argument(
        "--all", action="store_true", help="show every row, and archived runs as well"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=10.0,
        metavar="SECONDS",
        help="repeat every SECONDS (default: 10) until no run is queued or running any more; "
        f"the scheduler is asked every {WATCH_S:g} s; Ctrl-C ends it",
    )
    options = parser.parse_args(argv)
    try:
        with watching():
            while _show(options) and options.watch is not None:
                time.sleep(options.watch)
    except KeyboardInterrupt:
        if options.watch is None:
            raise
    return 0


def _show(options: argparse.Namespace) -> bool:
    """Print how the runs are; return whether one is under way."""
    console = Console()
    paths = select(options.dir, options.runs, archived=options.all, several=True)
    rows = [Row(run, state, time.time()) for run, state in states_of(paths)]
    sweep = one_sweep(options.dir, options.runs)
    search = None
    if sweep is not None and is_search(sweep):
        search = offered.Standing.of(sweep, [row.run for row in rows])
    if options.watch is not None and console.is_terminal:
        console.clear()
    if options.json:
        told: Any = [row.facts() for row in rows]
        print_json({"search": search.facts(), "runs": told} if search else told)
    elif search:
        console.print(_of_search(search, rows, len(rows) if options.all else _TRIALS))
    else:
        # Runs that are named may be in any folder.
        where = "" if options.runs else f" in {options.dir}"
        console.print(table(rows, where, console.width, len(rows) if options.all else _ROWS))
    return search.is_under_way if search else any(row.state.name in UNDER_WAY for row in rows)


def _of_search(search: Any, rows: list[Row], most: int) -> Group:
    """Return how a search stands, with at most so many of its trials."""
    lines = [*search.said(), *search.at_work()]
    head = Cell(f"{search.title}, {time.strftime('%H:%M:%S')}")
    return Group(head, *search.shown(most, "--all, --json"), *map(Cell, lines), *problems(rows))


def _seconds(text: str) -> float:
    try:
        return max(2.0, float(text))  # reading all runs more often is a load for the file system
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of seconds; give the run first: status {text} --watch"
        ) from None
