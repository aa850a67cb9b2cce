"""`python -m hpctrain logs RUN`: show the end of a run's log, or the error of a failed run."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.text import Text

from hpctrain.base.files.disk import open_regular
from hpctrain.base.terminal.console import Cell, Console, Table
from hpctrain.base.terminal.terminal import bytes_writer, harmless, printable
from hpctrain.cluster.slurm.patience import WATCH_S
from hpctrain.errors import StorageError
from hpctrain.runs.state.facts import Facts
from hpctrain.runs.state.first_error import Fault, batch_log, find_fault, rank_logs
from hpctrain.runs.state.select import add_dir, latest_run
from hpctrain.runs.state.state import UNDER_WAY, State, states_of

_BLOCK = 1 << 16  # bytes read at a time
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+\Z")
_READ = 4 << 20  # bytes of the end of a log
_FAILED = ("failed", "lost", "cancelled")
_READ_S = 0.5  # how often -f reads the log


def main(argv: list[str]) -> int:
    """Print the end of a log or the error of a failed run, or follow a log."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain logs",
        description="Print the end of the log of a run: rank 0, newest job. For a failed run, "
        "print the error instead, which is searched in the logs of all ranks and in the messages "
        "of Slurm.",
    )
    parser.add_argument("run", metavar="RUN", help="its directory, its name or the start of it")
    add_dir(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new lines until the run ends"
    )
    parser.add_argument("--rank", type=int, metavar="N", help="the log of this rank (default: 0)")
    parser.add_argument(
        "--lines", type=int, default=30, metavar="N", help="number of lines (default: 30)"
    )
    options = parser.parse_args(argv)
    try:
        return _show(options)
    except OSError as error:
        if error.filename is None:  # a closed pipe, as after `| head`
            raise
        raise StorageError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _show(options: argparse.Namespace) -> int:
    path = latest_run(options.dir, options.run, "logs")
    if options.follow:
        return _follow(path, options)
    ((run, state),) = states_of([path])
    fault = find_fault(run) if state.name in _FAILED and options.rank is None else None
    if fault:
        _print_fault(run, state, fault, sys.stdout)
    else:
        path = _log_file(run, state, options.rank)
        print(printable(f"==> {path} <=="), file=sys.stderr)
        _copy(path, _start(path, options.lines), bytes_writer())
    return 0


def _log_file(run: Facts, state: State, rank: int | None) -> Path:
    """Return the log to show: of the rank, or if no rank has one, of the batch script."""
    logs = rank_logs(run)
    if (rank or 0) in logs:
        return logs[rank or 0]
    if logs and rank is not None:
        ranks = f"there are {min(logs)} to {max(logs)}" if len(logs) > 1 else f"only {min(logs)}"
        raise StorageError(f"{run.name}: no rank {rank}; {ranks}")
    if (batch := batch_log(run)) is not None:
        return batch
    why = f"it is {state.name}{f' ({state.reason})' if state.reason else ''}"
    raise StorageError(f"{run.path}/logs: no log yet; {why}")


def _print_fault(run: Facts, state: State, fault: Fault, to: TextIO) -> None:
    who = "the batch script" if fault.rank is None else f"rank {fault.rank}"
    # For a failed run the reason is the error of rank 0, which says nothing new here.
    reason = f" ({state.reason})" if state.reason and state.name != "failed" else ""
    console, table = Console(stderr=to is sys.stderr, highlight=False), Table("", "")
    console.print(Cell(f"{run.name} is {state.name}{reason}; {who} says:"))
    console.print(Cell(f"{fault.file}:{fault.line}: {fault.summary}"), end="\n\n")
    for number, line in enumerate(fault.text, fault.first):
        mark = ">" if number == fault.line else " "
        table.add_row(f"{mark}{number:6}", Text(harmless(line.expandtabs())))
    console.print(table)


def _follow(path: Path, options: argparse.Namespace) -> int:
    """Print the end of the log and all new lines until the run ends, also after restarts."""
    shown: Path | None = None
    offset, last_query, write = 0, -WATCH_S, bytes_writer()
    try:
        while True:
            if time.monotonic() - last_query >= WATCH_S:
                ((run, state),) = states_of([path])
                last_query = time.monotonic()
            over = state.name not in UNDER_WAY
            try:
                newest = _log_file(run, state, options.rank)
            except StorageError:
                if over:
                    raise
            else:
                if newest != shown:
                    print(printable(f"==> {newest} <=="), file=sys.stderr)
                    # Print the last lines of the first log, but a log of a new job completely.
                    offset = _start(newest, options.lines) if shown is None else 0
                    shown = newest
                offset = _copy(newest, offset, write)
            if over:
                break
            if Facts.read(path).recorded_state != run.recorded_state:
                last_query = -WATCH_S  # ask the scheduler now
            else:
                time.sleep(_READ_S)
    except KeyboardInterrupt:
        return 0
    if state.name in _FAILED and (fault := find_fault(run)):
        print(file=sys.stderr)
        _print_fault(run, state, fault, sys.stderr)
    else:
        reason = f" ({state.reason})" if state.reason else ""
        print(printable(f"==> {run.name} is {state.name}{reason}"), file=sys.stderr)
    return 0


def _start(path: Path, lines: int) -> int:
    """Return the byte offset of the last `lines` lines, within the end of a long log.

    As on a terminal, a carriage return ends a line, too: progress bars have no other end.
    """
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, end - _READ))
        starts = [begin + match.start() for match in _LINE.finditer(file.read())]
    return starts[-lines] if 0 < lines <= len(starts) else begin if lines > 0 else end


def _copy(path: Path, offset: int, write: Callable[[bytes], None]) -> int:
    """Write the file from a byte offset on; return the byte offset of its end."""
    with open_regular(path) as file:
        file.seek(offset)
        while block := file.read(_BLOCK):
            write(block)
            offset += len(block)
    return offset
