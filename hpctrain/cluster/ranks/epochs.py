"""Epochs: which step of which job may write into a run directory, by the file `epochs`.

    DIR/epochs    12 0 0      job, restart count, step: each step of ranks adds its line first
                  12 0 1      the last line is the epoch of now

A rank can outlive its step, for example on a node that Slurm has lost. When another step has begun
meanwhile, whatever such a rank writes would spoil the run. So each commit of a checkpoint, a result
or an error first looks here, and a rank of an older epoch ends itself, without a word in the run.

The batch script lets rank 0 add the line (`cluster/slurm/steps.sh`). Ranks that were started in
another way have no epoch, and are not judged. The file only grows, and in place: so it is never
empty, and a client of NFS that opens it sees what another one has written.

Where the locks of a file system do not hold between hosts, or it has none, a second process may
begin with a run. Then the file `lock` names it, and the first one ends in the same way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.base.files.disk import text_of
from hpctrain.base.names.run_record import AttemptKey
from hpctrain.cluster.ranks.leaving import end_at_once


def begin(run: Path, key: AttemptKey) -> None:
    """Note that the ranks of a worker, a job of Slurm, train a run from now on.

    The step of a worker is noted in the worker's folder by its batch script, and here by rank 0.
    """
    if key.job_id and not is_last(run, key):
        with open(run / "epochs", "a", encoding="utf-8") as file:
            file.write(_own(key) + "\n")


def is_last(run: Path, key: AttemptKey) -> bool:
    """Return whether no other step has begun to train the run after the one with this key."""
    return _lines(run)[-1:] == [_own(key)]


def in_loop(run: Path, key: AttemptKey) -> bool:
    """Return whether a batch script has started these ranks that can start them again."""
    return _own(key) in _lines(run)


def follows(run: Path, key: AttemptKey) -> bool:
    """Return whether an earlier step of the same job has had ranks of this run."""
    lines = _lines(run)
    same = _own(key).rpartition(" ")[0] + " "
    return _own(key) in lines and any(one.startswith(same) for one in lines if one != _own(key))


def end_if_over(run: Path, key: AttemptKey) -> None:
    """End this process at once if another step, or process, has begun to train the run since."""
    lines = _lines(run)
    if _own(key) in lines and lines[-1] != _own(key):
        end_at_once(f"{run}: another step has begun, so this rank of step {key.step_id} ends")
    if run in _held and (holder := text_of(run / "lock")) not in ("", _held[run]):
        end_at_once(f"{run}: {holder.strip()[:100]} has begun to train it, so this one ends")


@contextmanager
def holding(run: Path, holder: str) -> Iterator[None]:
    """Let `end_if_over` see whether the file `lock` of a run still has this text."""
    _held[run] = holder
    try:
        yield
    finally:
        _held.pop(run, None)


_held: dict[Path, str] = {}


def _own(key: AttemptKey) -> str:
    return " ".join(map(str, key))


def _lines(run: Path) -> list[str]:
    try:
        return (run / "epochs").read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError:  # no batch script has started this run, or the file system is gone
        return []
