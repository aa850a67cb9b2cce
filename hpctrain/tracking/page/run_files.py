"""The files of a run directory that MLflow shows beside the run, as texts without secrets.

    at the start of an attempt   config.yaml, provenance/*, plots of the data set
    at its end                   the tails of logs, checkpoints.json

The texts are made when the uploader comes to the record of the start or the end, so they are there
also for a run that was killed, and for one that `hpctrain status --upload` uploads.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.disk import open_regular
from hpctrain.errors import DamageError
from hpctrain.record import Count, Record, read
from hpctrain.secrets import mask
from hpctrain.step_names import of_steps

_MOST_BYTES = 1 << 20  # of a text
_TAIL = 64 << 10  # bytes of a log
_MOST_LOGS = 8
_LOG = re.compile(r"(?P<job>.+?)(\.rank|_)(?P<rank>\d+)(\.log|_log\.out)$")
_ERROR = re.compile(r"^(Traceback \(most|error: |\[rank\d+\]: Traceback|Fatal Python)", re.M)


class _File(Record, frozen=True):
    bytes: Count


class _Manifest(Record, frozen=True):
    """What is shown of the manifest of a checkpoint; `checkpoint.files.manifest` has all."""

    step: Count
    files: dict[str, _File]
    digest: str
    healthy: bool = True


def at_start(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of the config, and of where code and packages are from."""
    for path in (run_dir / "config.yaml", *sorted((run_dir / "provenance").glob("*"))):
        content = _end_of(path, _MOST_BYTES, parts=len(path.relative_to(run_dir).parts))
        if content:
            yield str(path.relative_to(run_dir)), content


def at_end(run_dir: Path, failed: bool) -> Iterator[tuple[str, str]]:
    """Yield name and content of the ends of the logs, and the references of the checkpoints.

    If the attempt has failed, logs of other ranks that have an error are there as well.
    """
    for path in _logs(run_dir / "logs", failed):
        if content := _end_of(path, _TAIL):
            yield f"logs/{path.name}", content
    if found := checkpoints(run_dir):
        yield "checkpoints.json", json.dumps(found, indent=1) + "\n"


def checkpoints(run_dir: Path) -> list[dict[str, Any]]:
    """Return step, path, size and digest of the checkpoints of a run, in the order of steps.

    The manifest has the digest of every file, and its own digest covers these.
    """
    found = []
    for path in of_steps(run_dir / "checkpoints"):
        try:
            made = read(_Manifest, path / "manifest.json", parts=3)
        except (FileNotFoundError, DamageError):
            continue  # it is being removed, or it is damaged
        size = sum(file.bytes for file in made.files.values())
        facts = {"path": str(path), "bytes": size, "digest": made.digest, "healthy": made.healthy}
        found.append({"step": made.step, **facts})
    return found


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
