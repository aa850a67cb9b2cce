"""Jobs of `hpctrain.submit_function` in `status`, `logs` and `cancel`.

They are in OUTPUT_DIR/functions. What their classes import would take each command a second, so
the commands import this module where such a job is meant.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.console import Cell, Table
from hpctrain.disk import is_own, open_regular
from hpctrain.errors import ConfigError, StorageError
from hpctrain.launch.function import FunctionJob, LocalFunctionJob, opened, why_ended
from hpctrain.launch.function_call import Call
from hpctrain.runs.state.select import functions_in
from hpctrain.slurm import queue
from hpctrain.terminal import bytes_writer, printable

_READ_S = 0.5  # how often `logs -f` reads the log; the job asks the scheduler less and less often


def in_queue(folder: Path) -> list[Path]:
    """Return the function jobs of an output_dir that are queued or running."""
    if not (known := functions_in(folder)):
        return []
    try:
        jobs = queue.queued({queue.me()})
    except queue.UnreachableError:  # the table of runs tells it
        return []
    return [path for path in known if (str(path / "job.sh"), 0) in jobs]


def facts(path: Path) -> dict[str, Any]:
    """Return what a program reads of a function job."""
    call, job = Call.read(path), opened(path)
    return {
        "function": str(path),
        "call": f"{call.module}.{call.name}",
        "state": _state(job),
        "job_id": job.job_id,
        "reason": why_ended(job.state),
    }


def table(jobs: Sequence[dict[str, Any]]) -> Table:
    """Return a table of function jobs, from their facts."""
    found = Table("job of a function", "calls", "state", "job", "")
    for each in jobs:
        name = Path(each["function"]).name
        found.add_row(*map(Cell, (name, *(each[k] for k in ("call", "state", "job_id", "reason")))))
    return found


def cancel(paths: Sequence[Path]) -> list[dict[str, str]]:
    """Cancel the jobs; return what was done, for programs, and for people at "said"."""
    done = []
    for path in paths:
        job, action = opened(path), "skip"
        state = _state(job)
        if isinstance(job, LocalFunctionJob) and state == "unknown":
            said = "skipped: it ends with the program that has started it here"
        elif job.done():
            said = f"{state}, nothing to do"
        elif not is_own(path):
            said = f"{state}, skipped: it is another user's, who can cancel it"
        else:
            job.cancel()
            action, said = "cancel", f"cancelled, was {state}"
        done.append({"function": str(path), "job_id": job.job_id, "action": action, "said": said})
    return done


def show_log(
    path: Path,
    options: argparse.Namespace,
    start: Callable[[Path, int], int],
    copy: Callable[[Path, int, Callable[[bytes], None]], int],
) -> int:
    """Do for a function job what `logs` does for a run; return the exit code."""
    job, write = opened(path), bytes_writer()
    file = _log_file(path, job, options.rank)
    offset = start(file, options.lines)
    if options.json:
        if options.follow:
            raise ConfigError("logs -f prints lines as they come; leave out --json")
        with open_regular(file) as opened_log:
            opened_log.seek(offset)
            lines = opened_log.read().decode(errors="replace").splitlines()
        print(json.dumps(facts(path) | {"file": str(file), "lines": lines}))
        return 0
    print(printable(f"==> {file} <=="), file=sys.stderr)
    with suppress(KeyboardInterrupt):
        while True:
            over = not options.follow or job.done()
            offset = copy(file, offset, write)
            if over:
                break
            time.sleep(_READ_S)
    return 0


def _log_file(path: Path, job: FunctionJob | LocalFunctionJob, rank: int | None) -> Path:
    logs = {number: file for number, file in enumerate(job._paths.ranks()) if file.exists()}
    if (rank or 0) in logs:
        return logs[rank or 0]
    if rank is None and (batch := sorted((path / "batch").glob("*.log"))):
        return batch[-1]
    ranks = f"; there are ranks {', '.join(map(str, logs))}" if logs else ""
    raise StorageError(f"{path}/logs: no log of rank {rank or 0} yet; it is {_state(job)}{ranks}")


def _state(job: FunctionJob | LocalFunctionJob) -> str:
    return str(job.state).lower()
