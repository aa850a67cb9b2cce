"""What the ranks of a worker train: the lines of the file `pieces` in the worker's folder.

    {"job_id": "12_0", …, "run": "…/runs/digits-3fa92c1b", "until": 500}    train this
    {"job_id": "12_0", …}                                                   it is over
    {"job_id": "12_0", …, "code": 0}                                        the worker ends
    (an empty line)                                                         rank 0 still waits

Rank 0 of the worker writes, and the other ranks read: a run directory is named, and no code or
object is sent. A line has the key of its step, so ranks of another step do not heed it. The file
only grows, in place, so a client of NFS that opens it sees what another one has written.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpctrain.base.files import record
from hpctrain.base.files.disk import open_regular
from hpctrain.base.files.record import Count
from hpctrain.base.names.run_record import AttemptKey, Keyed
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.leaving import end_at_once
from hpctrain.config.frozen import load
from hpctrain.engine.job.verdict import is_over, of_run
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.runs.state.end import left_s
from hpctrain.runs.state.verdict import LEAVES, MOST, Room

log = logging.getLogger(__name__)

FILE = "pieces"
_SIGN_S, _SILENT_S = 30.0, 600.0
_INTERRUPTED = 130  # by a person
_NAP_S = 0.05, 1.0  # between two looks: at first, and at most


class _Piece(Keyed, frozen=True, kw_only=True):
    """A line: the run directory, and the global step at which it pauses; 0 is its end."""

    run: str = ""
    until: Count = 0
    code: Count | None = None


def add(worker: Path, key: AttemptKey, **facts: str | int) -> None:
    """Add a line of the ranks with this key; rank 0 calls it."""
    _append(worker, json.dumps(key._asdict() | facts))


def current(worker: Path, key: AttemptKey) -> _Piece | None:
    """Return what the ranks with this key train, or trained when they ended; None for nothing."""
    mine = [piece for piece in _read(worker)[0] if piece.key == key]
    return mine[-1] if mine and mine[-1].run else None


def steps_without(worker: Path, key: AttemptKey) -> int:
    """Return how many steps of this job in a row, up to that of the key, have begun no piece."""
    begun = [each.step_id for each in _read(worker)[0] if each.run and each.key[:2] == key[:2]]
    return key.step_id - max(begun, default=-1)


def of_worker(worker: Path, code: int, key: AttemptKey) -> tuple[RunDir | None, str]:
    """Return what becomes of the job of a worker, and its trial if that has ended for good.

    The verdict is on the trial in training; if it has failed for good, the worker goes on with
    others. Whoever takes the trial next finds in run.json what was decided.
    """
    room = Room(inside=True, left_s=left_s())
    over = None
    if stop_request.read(worker):  # the trial waits for another command
        return None, "cancel"
    if piece := current(worker, key):
        run = RunDir.open(Path(piece.run))
        record = run.read()
        done = record.state == "finished" or record.paused_at == piece.until
        if not done and epochs.is_last(run.path, key):  # else another worker has it by now
            words = of_run(run, code, key, inside=True)
            if words != LEAVES and not is_over(words):
                return None, words
            log.error("%s has ended: the worker goes on with other trials", run.name)
            over = run if is_over(words) else None
        room = room._replace(warn_s=load(run.config_file).launch.warn_s)
    elif code <= 128 or code == _INTERRUPTED or steps_without(worker, key) > MOST:
        return None, ""  # the ranks have told why
    return over, "requeue" if room.ends_soon else "restart"


def follow(worker: Path, key: AttemptKey) -> Iterator[_Piece]:
    """Yield the lines of these ranks as rank 0 adds them; this process ends if rank 0 is silent."""
    size, nap, heard = 0, _NAP_S[0], time.monotonic()
    while True:
        before, (found, size) = size, _read(worker, size)
        yield from (piece for piece in found if piece.key == key)
        if size > before:
            nap, heard = _NAP_S[0], time.monotonic()
        if time.monotonic() - heard > _SILENT_S:
            end_at_once(f"rank 0 gives no sign of life in {worker / FILE}, so this rank ends, too")
        time.sleep(nap)
        nap = min(2 * nap, _NAP_S[1])


@contextmanager
def signs(worker: Path) -> Iterator[None]:
    """Give the other ranks a sign of life in the context, in which rank 0 waits."""
    over = threading.Event()

    def give() -> None:
        while not over.wait(_SIGN_S):
            with suppress(OSError):  # a full disk ends the training, and not the wait
                _append(worker, "")

    thread = threading.Thread(target=give, name="hpctrain-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _append(worker: Path, line: str) -> None:
    with open(worker / FILE, "ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def _read(worker: Path, since: int = 0) -> tuple[list[_Piece], int]:
    """Return the pieces in the whole lines from a byte on, and the byte after these lines."""
    try:
        with open_regular(worker / FILE) as file:
            file.seek(since)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return [], since
    pieces = [record.decode(_Piece, line, worker / FILE) for line in lines if line]
    return pieces, since + sum(len(line) + 1 for line in lines)
