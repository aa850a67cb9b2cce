"""`python -m hpctrain logs RUN`: show the end of a run's log; of a failed run why it has failed.

    Slurm             RUN/logs/123_4.rank0.log, and array-N/batch/123_4.log of its sweep, or
                      RUN/logs/123_4.batch.log if several runs share the job
    submitit's local  RUN/logs/JOB_0_log.out
    in a terminal     RUN/logs/terminal_N.rank0.log, for the Nth attempt there

A job that Slurm restarts appends to its files.

When a rank dies, the other ranks fail too, because a connection is broken; their errors are not the
cause. A rank records its own error (`failure`), and the observers name one that does not get on.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.base.errors import ConfigError, StorageError
from hpctrain.base.files.disk import open_regular
from hpctrain.base.terminal.console import print_json
from hpctrain.base.terminal.terminal import bytes_writer, harmless, printable
from hpctrain.cluster.slurm.patience import WATCH_S
from hpctrain.commands.facts import Facts
from hpctrain.commands.select import add_dir, latest_run
from hpctrain.commands.state import UNDER_WAY, State, states_of
from hpctrain.runs.state.failure import Failure

_BLOCK = 1 << 16  # bytes read at a time
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+\Z")
_READ = 4 << 20  # bytes of the end of a log
_FAILED = ("failed", "lost", "cancelled")
_OF_BATCH = 10  # lines of the batch script beside those of a rank
_READ_S = 0.5  # how often -f reads the log
_RANK_LOG = re.compile(r"(?P<job>.+)\.rank(?P<rank>\d+)\.log$")
_LOCAL_LOG = re.compile(r"(?P<job>.+)_(?P<rank>\d+)_log\.out$")


def main(argv: list[str]) -> int:
    """Print the end of a log or the error of a failed run, or follow a log."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain logs",
        description="Print the end of the log of a run: rank 0, newest job. For a failed run, "
        "print why it has failed, and the ends of the logs of the rank that has failed first and "
        "of the batch script, which has the messages of Slurm.",
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
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    options = parser.parse_args(argv)
    if options.json and options.follow:
        raise ConfigError("--json and --follow: a log that goes on is no object; leave one out")
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
    if options.json:
        _print_json(run, state, options)
    elif state.name in _FAILED and options.rank is None:
        _tell_failure(run, state, options.lines)
    else:
        path = _log_file(run, state, options.rank)
        print(printable(f"==> {path} <=="), file=sys.stderr)
        _copy(path, _start(path, options.lines), bytes_writer())
    return 0


def _print_end(log: Path, lines: int) -> None:
    """Print the last lines of a log beside words of ours, so without control characters."""
    print(printable(f"==> {log} <=="), file=sys.stderr, flush=True)
    with open_regular(log) as file:
        file.seek(_start(log, lines))
        print(harmless(file.read(_READ).decode(errors="replace")).rstrip("\n"), flush=True)


def _tell_failure(run: Facts, state: State, lines: int) -> None:
    """Print why a run has failed, and the ends of the logs that tell most of it."""
    rank, batch = telling(run), _batch_log(run)
    reason = f" ({state.reason})" if state.reason else ""
    says = "" if rank is None else f"; rank {rank} says:"
    print(printable(f"{run.name} is {state.name}{reason}{says}"), flush=True)
    if rank is not None or batch is None:
        _print_end(_log_file(run, state, rank), lines)
    if batch is not None:
        _print_end(batch, lines if rank is None else _OF_BATCH)


def _print_json(run: Facts, state: State, options: argparse.Namespace) -> None:
    """Print why a run has failed, or "", and the end of the log that tells most of it."""
    rank = telling(run) if state.name in _FAILED and options.rank is None else options.rank
    file = _log_file(run, state, rank)
    shown = list[bytes]()
    _copy(file, _start(file, options.lines), shown.append)
    lines = b"".join(shown).decode(errors="replace").splitlines()
    facts = {"run": str(run.path), "state": state.name, "reason": state.reason}
    print_json(facts | {"rank": rank, "log": str(file), "lines": lines})


def _log_file(run: Facts, state: State, rank: int | None) -> Path:
    """Return the log to show: of the rank, or if no rank has one, of the batch script."""
    logs = rank_logs(run)
    if (rank or 0) in logs:
        return logs[rank or 0]
    if logs and rank is not None:
        ranks = f"there are {min(logs)} to {max(logs)}" if len(logs) > 1 else f"only {min(logs)}"
        raise StorageError(f"{run.name}: no rank {rank}; {ranks}")
    if (batch := _batch_log(run)) is not None:
        return batch
    why = f"it is {state.name}{f' ({state.reason})' if state.reason else ''}"
    raise StorageError(f"{run.path}/logs: no log yet; {why}")


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
    reason = f" ({state.reason})" if state.reason else ""
    print(printable(f"==> {run.name} is {state.name}{reason}"), file=sys.stderr)
    if state.name in _FAILED and (rank := telling(run)) not in (None, options.rank or 0):
        _print_end(_log_file(run, state, rank), options.lines)
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


def telling(run: Facts) -> int | None:
    """Return the rank whose log tells why a run has failed; None if no rank has written one.

    It is the one that has recorded its error, or was named by the observers, or else the one that
    stopped writing first.
    """
    logs = rank_logs(run)
    error, now = Failure.get(run.path), run.attempt
    is_new = error is not None and error.key == now.key and error.time >= now.started
    named = error.rank if error and is_new else run.hang.rank if run.hang else None
    if named in logs:
        return named
    # A log that the last attempt has not written to has only errors of older attempts.
    written = {rank: _mtime(path) for rank, path in logs.items() if path.stat().st_size}
    began = now.started - 1.0 if run.recorded_state != "queued" else 0.0
    return min(((at, rank) for rank, at in written.items() if at >= began), default=(0, None))[1]


def rank_logs(run: Facts) -> dict[int, Path]:
    """Return the log of each rank of the newest job, by rank."""
    jobs: dict[str, dict[int, Path]] = {}
    for path in sorted((run.path / "logs").glob("*"), key=_mtime):
        # A FIFO in place of a log would be waited for.
        if (match := _RANK_LOG.match(path.name) or _LOCAL_LOG.match(path.name)) and path.is_file():
            # Each rank counts its own attempts in a terminal, so the numbers may differ.
            job = "terminal" if match["job"].startswith("terminal_") else match["job"]
            jobs.setdefault(job, {})[int(match["rank"])] = path
    if run.job_id in jobs:
        return jobs[run.job_id]
    # The job has printed nothing yet, or the run has no job: take the logs written last.
    return max(jobs.values(), key=lambda logs: max(map(_mtime, logs.values())), default={})


def _batch_log(run: Facts) -> Path | None:
    """Return the log of the batch script, which also has the messages of srun and Slurm."""
    if not run.submission:
        return None
    folder = Path(run.submission.script).parent / "batch"
    own = run.path / "logs" / f"{run.job_id}.batch.log"
    return next((path for path in (own, folder / f"{run.job_id}.log") if path.is_file()), None)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
