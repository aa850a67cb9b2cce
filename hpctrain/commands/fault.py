"""Why a run failed: the one error among the logs of all ranks that began it.

When a rank dies, the others fail too, with a broken connection; theirs is not the cause. So, in
this order: the traceback of the rank that fell silent first, without those; what Slurm printed
(killed, out of memory, no such program); a broken connection after all; the last lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.commands.facts import Facts
from hpctrain.commands.files import batch_log, rank_logs

_BEFORE, _AFTER = 25, 5  # lines shown around an error
_READ = 4 << 20  # bytes of a log's end
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, before the lines of an uncaught exception
_TRACEBACK = "Traceback (most recent call last):"
_OWN = re.compile(r"error: \S")  # how hpctrain tells what the user can mend
_CRASH = re.compile(
    r"Fatal Python error|terminate called|.*(Segmentation fault|Bus error)"
    r"|rank: (line )?\d+: exec: "  # there is no such python; the shell is called so
)
# A collective that timed out is a cause: then some rank hangs, and none has died.
_NOISE = re.compile(
    r"Connection (closed|reset|refused)|Broken ?pipe|(remote|peer).* (closed|exited|disconnected)"
    r"|gloo/transport(?!.*Timed out)|NCCL communicator was aborted|ncclRemoteError|ncclSystemError"
    r"|ChildFailedError|KeyboardInterrupt|SystemExit",
    re.IGNORECASE,
)
_SLURM = re.compile(r"(srun|slurmstepd\S*|slurmd\S*): (error: )?(?P<said>.*)")
_RESTART = re.compile(r".*DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)|.*Requeued")
# The telling ones first; what only follows from another death last.
_WORDS = (
    re.compile(r"oom.kill|out of memory", re.IGNORECASE),
    re.compile(r"execve|No such file|Permission denied|Unable to|cannot", re.IGNORECASE),
    re.compile(r"DUE TO TIME LIMIT|NODE FAILURE", re.IGNORECASE),
    re.compile(r"task.*: (Killed|Segmentation|Aborted|Bus)"),
    re.compile(r"Exited with exit code"),
)


@dataclass(frozen=True)
class Fault:
    """An error and where it stands.

    Attributes:
        summary: in one line.
        file: the log.
        line: of the summary, counted from 1.
        text: the lines around it.
        first: line number of the first of them.
        rank: who wrote it; None for the batch script.
    """

    summary: str
    file: Path
    line: int
    text: list[str]
    first: int
    rank: int | None


@dataclass(frozen=True)
class Log:
    """The end of a log file; `first` is the number of its first line."""

    path: Path
    lines: list[str]
    first: int
    rank: int | None

    def fault(self, index: int, summary: str = "") -> Fault:
        """The error on line `index` of `lines`."""
        begin = max(0, index - _BEFORE)
        text = self.lines[begin : index + 1 + _AFTER]
        said = " ".join((summary or self.lines[index]).split())
        return Fault(said, self.path, self.first + index, text, self.first + begin, self.rank)


def find_fault(run: Facts) -> Fault | None:
    """The error that a failed run failed with; None when nothing was ever printed."""
    ranks = [tail(path, rank) for rank, path in _of_last_attempt(run)]
    causes, noise = [], []
    for log in ranks:
        own, of_others = _errors(log)
        causes += own[-1:]
        noise += of_others[-1:]
    if causes:
        return causes[0]
    batch = batch_log(run)
    # A task that could not even start has Slurm's words in its own log.
    logs = [*([tail(batch, None)] if batch else []), *ranks]
    if words := [word for log in logs for word in _slurms_words(log)]:
        return min(words, key=lambda word: word[0])[1]
    last_lines = [log.fault(len(log.lines) - 1) for log in logs if log.lines]
    return next(iter([*noise, *last_lines]), None)


def is_of_another_rank(error: str) -> bool:
    """Whether an error only says that another rank is gone."""
    return _NOISE.search(error) is not None


def tail(path: Path, rank: int | None) -> Log:
    """The end of a file, with its lines' true numbers."""
    first = 1
    with path.open("rb") as file:
        skip = max(0, path.stat().st_size - _READ)
        while skip and (block := file.read(min(skip, 1 << 20))):
            first += block.count(b"\n")
            skip -= len(block)
        lines = file.read().decode(errors="replace").splitlines()
    return Log(path, lines, first, rank)


def _of_last_attempt(run: Facts) -> list[tuple[int, Path]]:
    """The ranks' logs, the one that fell silent first in front."""
    began = float(run.attempt.get("started", 0.0)) if run.said != "queued" else 0.0
    dated = []
    for rank, path in rank_logs(run).items():
        status = path.stat()
        # One that was silent in the last attempt holds the errors of an older one.
        if status.st_size and status.st_mtime >= began - 1.0:
            dated.append((status.st_mtime, rank, path))
    return [(rank, path) for _, rank, path in sorted(dated)]


def _errors(log: Log) -> tuple[list[Fault], list[Fault]]:
    """The errors in a rank's log, and those that only tell of another rank's death."""
    own: list[Fault] = []
    of_others: list[Fault] = []
    for index, summary in _ends(log.lines):
        (of_others if is_of_another_rank(summary) else own).append(log.fault(index, summary))
    return own, of_others


def _ends(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Where tracebacks end, with their last line: `RuntimeError: mat1 and mat2 …`."""
    inside = False
    for index, printed in enumerate(lines):
        line = _PREFIX.sub("", printed)
        if line.startswith(_TRACEBACK):
            inside = True
        elif inside and line and not line[0].isspace():
            inside = False
            yield index, line
        elif not inside and (_OWN.match(line) or _CRASH.match(line)):
            yield index, line


def _slurms_words(log: Log) -> Iterator[tuple[int, Fault]]:
    """What srun and slurmstepd said since the last restart; the more telling, the lower."""
    restarts = [index for index, line in enumerate(log.lines) if _RESTART.match(line)]
    for index in range(restarts[-1] + 1 if restarts else 0, len(log.lines)):
        if match := _SLURM.match(log.lines[index]):
            for place, word in enumerate(_WORDS):
                if word.search(match["said"]):
                    yield place, log.fault(index)
                    break
