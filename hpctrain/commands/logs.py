"""`python -m hpctrain logs RUN`: what a run prints, or why it failed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TextIO

from hpctrain.commands.facts import Facts, gather
from hpctrain.commands.fault import Fault, find_fault, tail
from hpctrain.commands.files import batch_log, rank_logs
from hpctrain.commands.select import add_arguments, select
from hpctrain.commands.state import UNDER_WAY, State, judge
from hpctrain.errors import ConfigError, StorageError

_FAILED = ("failed", "lost", "cancelled")
_LOOK_S = 0.5
_ASK_S = 10.0  # how often -f asks the scheduler whether more will come


def main(argv: list[str]) -> int:
    """Print the end of a log, the error of a failed run, or follow."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain logs",
        description="Print the end of a run's log: the newest job's, of rank 0. Of a failed run, "
        "the error instead: found among all ranks' logs and what Slurm printed.",
    )
    add_arguments(parser, "one run")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", type=int, metavar="N", help="this rank's log (default: 0)")
    parser.add_argument("--lines", type=int, default=30, metavar="N", help="how many (default: 30)")
    options = parser.parse_args(argv)
    if not options.runs:
        raise ConfigError("logs needs a run: python -m hpctrain logs RUN (see status)")
    paths = select(options.dir, options.runs)
    if len(paths) != 1:
        names = ", ".join(path.name for path in paths[:5])
        raise ConfigError(f"logs shows one run at a time; these are {len(paths)}: {names}")
    if options.follow:
        return _follow(paths[0], options)
    (run,) = gather(paths)
    state = judge(run, time.time())
    fault = find_fault(run) if state.name in _FAILED and options.rank is None else None
    if options.json:
        _print_json(run, state, fault, options)
    elif fault:
        _print_fault(run, state, fault, sys.stdout)
    else:
        path = _log_file(run, state, options.rank)
        print(f"==> {path} <==", file=sys.stderr)
        print(*_last(path, options.lines), sep="\n")
    return 0


def _log_file(run: Facts, state: State, rank: int | None) -> Path:
    """The file to show.

    Raises:
        StorageError: there is none, with the reason.
    """
    logs = rank_logs(run)
    if (rank or 0) in logs:
        return logs[rank or 0]
    if logs and rank is not None:
        there = f"there are {min(logs)} to {max(logs)}" if len(logs) > 1 else f"only {min(logs)}"
        raise StorageError(f"{run.name}: no rank {rank}; {there}")
    if (batch := batch_log(run)) is not None:
        return batch
    if _in_terminal(run):
        why = f"it was started in a terminal on {run.attempt.get('host')}, and prints there"
    elif run.job_id and not run.submission:
        why = f"sbatch was told where job {run.job_id} prints (slurm-{run.job_id}.out if nothing)"
    else:
        why = f"it is {state.name}{f' ({state.reason})' if state.reason else ''}"
    raise StorageError(f"{run.path}/logs: no log yet; {why}")


def _in_terminal(run: Facts) -> bool:
    return run.attempt.get("launcher") in ("single", "torchrun")


def _last(path: Path, count: int) -> list[str]:
    return tail(path, None).lines[-count:] if count > 0 else []


def _print_fault(run: Facts, state: State, fault: Fault, to: TextIO) -> None:
    who = "the batch script" if fault.rank is None else f"rank {fault.rank}"
    # A failed run's reason is rank 0's error: the same one, or less.
    reason = f" ({state.reason})" if state.reason and state.name != "failed" else ""
    print(f"{run.name} is {state.name}{reason}; {who} says:", file=to)
    print(f"{fault.file}:{fault.line}: {fault.summary}\n", file=to)
    for number, line in enumerate(fault.text, fault.first):
        print(f"{'>' if number == fault.line else ' '}{number:6}  {line}", file=to)


def _print_json(run: Facts, state: State, fault: Fault | None, options: argparse.Namespace) -> None:
    facts: dict[str, object] = {
        "run": str(run.path),
        "state": state.name,
        "reason": state.reason,
        "error": fault
        and {
            "summary": fault.summary,
            "file": str(fault.file),
            "line": fault.line,
            "rank": fault.rank,
            "text": fault.text,
        },
    }
    if fault is None:
        path = _log_file(run, state, options.rank)
        facts |= {"file": str(path), "lines": _last(path, options.lines)}
    print(json.dumps(facts))


def _follow(path: Path, options: argparse.Namespace) -> int:
    """Print what is there and what comes, across restarts and new jobs, until the run ends."""
    if options.json:
        raise ConfigError("logs -f prints lines as they come; leave out --json")
    shown: Path | None = None
    offset, asked = 0, -_ASK_S
    try:
        while True:
            if time.monotonic() - asked >= _ASK_S:
                (run,) = gather([path])
                state = judge(run, time.time())
                asked = time.monotonic()
            over = state.name not in UNDER_WAY
            try:
                newest = _log_file(run, state, options.rank)
            except StorageError:
                if over or _in_terminal(run):
                    raise
            else:
                if newest != shown:
                    print(f"==> {newest} <==", file=sys.stderr)
                    # What was there before is shown from its last lines, a new file whole.
                    offset = _start(newest, options.lines) if shown is None else 0
                    shown = newest
                offset = _copy(newest, offset)
            if over:
                break
            if _ended(path, run):
                asked = -_ASK_S  # look again, now
            else:
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return 0
    if state.name in _FAILED and (fault := find_fault(run)):
        print(file=sys.stderr)
        _print_fault(run, state, fault, sys.stderr)
    else:
        said = f" ({state.reason})" if state.reason else ""
        print(f"==> {run.name} is {state.name}{said}", file=sys.stderr)
    return 0


def _ended(path: Path, run: Facts) -> bool:
    """Whether run.json tells another state than before."""
    return Facts.read(path).said != run.said


def _start(path: Path, lines: int) -> int:
    text = path.read_bytes()
    kept = b"".join(text.splitlines(keepends=True)[-lines:]) if lines > 0 else b""
    return len(text) - len(kept)


def _copy(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(1 << 16):
            sys.stdout.buffer.write(block)
            offset += len(block)
    sys.stdout.buffer.flush()
    return offset
