"""The files of a run directory that MLflow shows beside the run, as texts without secrets.

    at the start of an attempt   config.yaml, provenance/*
    at its end                   the tails of logs

The texts are made when the uploader comes to the record of the start or the end, so they are there
also for a run that was killed, and for one that `hpctrain status --upload` uploads.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.files.disk import open_regular
from hpctrain.base.secrets import mask

_MOST_BYTES = 1 << 20  # of a text
_TAIL = 64 << 10  # bytes of a log
_MOST_LOGS = 8
_LOG = re.compile(r"(?P<job>.+?)(\.rank|_)(?P<rank>\d+)(\.log|_log\.out)$")
_ERROR = re.compile(r"^(Traceback \(most|error: |\[rank\d+\]: Traceback|Fatal Python)", re.M)


def at_start(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of the config, and of where code and packages are from."""
    for path in (run_dir / "config.yaml", *sorted((run_dir / "provenance").glob("*"))):
        content = _end_of(path, _MOST_BYTES, parts=len(path.relative_to(run_dir).parts))
        if content:
            yield str(path.relative_to(run_dir)), content


def at_end(run_dir: Path, failed: bool) -> Iterator[tuple[str, str]]:
    """Yield name and content of the ends of the logs.

    If the attempt has failed, logs of other ranks that have an error are there as well.
    """
    for path in _logs(run_dir / "logs", failed):
        if content := _end_of(path, _TAIL):
            yield f"logs/{path.name}", content


def _logs(folder: Path, failed: bool) -> list[Path]:
    """Return the logs to show: that of rank 0, and after a failure those that have an error."""
    dated = [
        (path.lstat().st_mtime, int(match["rank"]), path)
        for path in folder.glob("*")
        if (match := _LOG.match(path.name))
    ]
    dated.sort(reverse=True)
    main = [path for _, rank, path in dated if rank == 0][:1]
    if not failed:
        return main
    others = (path for _, rank, path in dated if rank)
    wrong = [path for path in others if _ERROR.search(_end_of(path, _TAIL))]
    return main + wrong[: _MOST_LOGS - len(main)]


def _end_of(path: Path, size: int, parts: int = 2) -> str:
    """Return the end of a text file without secrets; "" if it is a link or no regular file.

    A link of somebody else could lead to a private file of the user who uploads the run.
    """
    try:
        with open_regular(path, parts) as file:
            whole = file.seek(0, 2)
            file.seek(max(0, whole - size))
            content = file.read(size).decode(errors="replace")
    except OSError:
        return ""
    if whole > size:
        content = f"... (only the last {size >> 10} KiB)\n{content.partition(chr(10))[2]}"
    return mask(content)
