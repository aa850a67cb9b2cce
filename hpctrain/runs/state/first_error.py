"""Find the output of a run, and why it has failed: the first error in the logs of all ranks.

    Slurm             RUN/logs/123_4.rank0.log, and array-N/batch/123_4.log of its sweep, or
                      RUN/logs/123_4.batch.log if several runs share the job
    submitit's local  RUN/logs/JOB_0_log.out
    in a terminal     RUN/logs/terminal_N.rank0.log, for the Nth attempt there

A job that Slurm restarts appends to its files.

When a rank dies, the other ranks fail too, because a connection is broken; their errors are not the
cause. So the error is, in this order:

1. which rank did not get on, as the observers of the nodes have said;
2. the traceback of the rank that stopped writing first, except those of broken connections;
3. a message of Slurm (killed, out of memory, no such program);
4. an error of a broken connection;
5. the last line of a log.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.files.disk import open_regular
from hpctrain.base.processes.causes import ANOTHER_RANK, cause_of
from hpctrain.runs.state.facts import Facts

_RANK_LOG = re.compile(r"(?P<job>.+)\.rank(?P<rank>\d+)\.log$")
_LOCAL_LOG = re.compile(r"(?P<job>.+)_(?P<rank>\d+)_log\.out$")
_BEFORE, _AFTER = 25, 5  # lines shown around an error
_READ = 4 << 20  # bytes read from the end of a log
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch prints it before lines of an uncaught exception
_TRACEBACK = "Traceback (most recent call last):"
_OWN = re.compile(r"error: \S")  # hpctrain's message for an error that the user can correct
_CRASH = re.compile(
    r"Fatal Python error|terminate called|.*(Segmentation fault|Bus error)"
    r"|rank: (line )?\d+: exec: "  # the shell that starts python has not found it
)
_MORE = re.compile(r"nccl\w+: |Last error:|  what\(\): ")
_SLURM = re.compile(r"(srun|slurmstepd\S*|slurmd\S*): (error: )?(?P<message>.*)")
_RESTART = re.compile(r".*DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)|.*Requeued")
# The most informative first, those that only follow from another error last.
_SLURM_MESSAGES = (
    re.compile(r"oom.kill|out of memory", re.IGNORECASE),
    re.compile(r"execve|No such file|Permission denied|Unable to|cannot", re.IGNORECASE),
    re.compile(r"DUE TO TIME LIMIT|NODE FAILURE", re.IGNORECASE),
    re.compile(r"task.*: (Killed|Segmentation|Aborted|Bus)"),
    re.compile(r"Exited with exit code"),
)
# How telling an error is; between these are the places of Slurm's messages.
_CAUSE, _MESSAGE, _FOLLOWS = 1, 10, 100


@dataclass(frozen=True)
class Fault:
    """An error and its place in a log."""

    summary: str  # the error in one line
    file: Path  # the log
    line: int  # of the summary, counted from 1
    text: list[str]  # the lines around it
    first: int  # the number of the first line of `text`
    rank: int | None  # that wrote it; None for the batch script


@dataclass(frozen=True)
class Log:
    """The end of a log file; `first` is the number of its first line."""

    path: Path
    lines: list[str]
    first: int
    rank: int | None

    def fault(self, index: int, summary: str = "") -> Fault:
        """Return the error on line `index` of `lines`."""
        begin, end = max(0, index - _BEFORE), index + 1
        while end < len(self.lines) and self.lines[end].startswith("  "):
            end += 1  # an error of a user's constructor has its frames below it
        text = self.lines[begin : max(end, index + 1 + _AFTER)]
        summary = " ".join((summary or self.lines[index]).split())
        return Fault(summary, self.path, self.first + index, text, self.first + begin, self.rank)


def find_fault(run: Facts) -> Fault | None:
    """Return the error that a run has failed with; None if nothing was printed."""
    ranks = [tail(path, rank) for rank, path in _of_last_attempt(run)]
    batch = batch_log(run)
    hang, found = run.hang, list[tuple[int, Fault]]()
    for log in ranks:
        for index, summary in reversed([*_ends(log.lines)]):
            place = _FOLLOWS if cause_of(summary) is ANOTHER_RANK else _CAUSE
            found.append((place, log.fault(index, summary)))
        # A rank that has died may have said more.
        place = _CAUSE + 1 if hang and hang.state == "dead" else _CAUSE - 1
        named = [i for i, line in enumerate(log.lines) if hang and line.endswith(hang.sentence)]
        found += [(place, log.fault(i, hang.sentence if hang else "")) for i in named]
    # If a rank could not be started, Slurm's message is in the log of the rank.
    logs = [*([tail(batch, None)] if batch else []), *ranks]
    for log in logs:
        found += _slurm_messages(log)
    found += [(_FOLLOWS + 1, log.fault(len(log.lines) - 1)) for log in logs if log.lines]
    return min(found, key=lambda each: each[0])[1] if found else None


def tail(path: Path, rank: int | None) -> Log:
    """Read the end of a log, and count the lines before it."""
    first = 1
    with open_regular(path) as file:
        skip = max(0, os.fstat(file.fileno()).st_size - _READ)
        while skip and (block := file.read(min(skip, 1 << 20))):
            first += block.count(b"\n")
            skip -= len(block)
        lines = file.read(_READ).decode(errors="replace").splitlines()
    return Log(path, lines, first, rank)


def _of_last_attempt(run: Facts) -> list[tuple[int, Path]]:
    """Return the logs of the ranks; the one that was written last is the last."""
    began = run.attempt.started if run.recorded_state != "queued" else 0.0
    dated = []
    for rank, path in rank_logs(run).items():
        status = path.stat()
        # A log that the last attempt has not written to has only errors of older attempts.
        if status.st_size and status.st_mtime >= began - 1.0:
            dated.append((status.st_mtime, rank, path))
    return [(rank, path) for _, rank, path in sorted(dated)]


def _ends(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the index and the text of the last line of each traceback and of each crash message."""
    inside = False
    for index, printed in enumerate(lines):
        line = _PREFIX.sub("", printed)
        if line.startswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            yield index, _whole(line, lines[index + 1 :])
        elif not inside and (_OWN.match(line) or _CRASH.match(line)):
            yield index, _whole(line, lines[index + 1 :])


def _whole(error: str, below: list[str]) -> str:
    """Return an error with what NCCL and the C++ runtime say of it in the lines below."""
    said = [error]
    for line in below[:4]:
        line = _PREFIX.sub("", line)
        if said[-1] != "Last error:" and not _MORE.match(line):
            break
        said.append(line.strip())
    return " ".join(said)


def _slurm_messages(log: Log) -> Iterator[tuple[int, Fault]]:
    """Yield the messages of Slurm since the last restart, with how telling they are."""
    restarts = [index for index, line in enumerate(log.lines) if _RESTART.match(line)]
    for index in range(restarts[-1] + 1 if restarts else 0, len(log.lines)):
        if match := _SLURM.match(log.lines[index]):
            for place, pattern in enumerate(_SLURM_MESSAGES):
                if pattern.search(match["message"]):
                    yield _MESSAGE + place, log.fault(index)
                    break


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


def batch_log(run: Facts) -> Path | None:
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
