"""The run directory of a trial: frozen by the worker that asked for it, taken over by others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base import secrets
from hpctrain.base.errors import HpctrainError, LaunchError
from hpctrain.base.files.disk import write_atomically
from hpctrain.base.files.lock import file_lock
from hpctrain.base.files.record import read, written
from hpctrain.base.processes.causes import NON_FINITE, RANK_KILLED, one_line
from hpctrain.cluster.slurm.queue import me
from hpctrain.config.frozen import dump, executed
from hpctrain.launch.entry import Entry, Status
from hpctrain.runs import trust
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.start_again import may_start_again
from hpctrain.runs.state import stop_request
from hpctrain.runs.state.end import End
from hpctrain.runs.state.verdict import DECIDED_LATER, Room, decide
from hpctrain.search.trials import FoundSearch
from hpctrain.search.worker_arrays import WorkerFile

_NAP_S = 0.05


class Pruned(HpctrainError):
    """A trial is not trained any more, although nothing has failed."""


@dataclass(frozen=True)
class TrialPiece:
    """The training of a trial up to a rung.

    `until` is the global step of the rung, or None for the end of the run, and `began` is when the
    trial began, in seconds since the epoch.
    """

    run: Path
    until: int | None
    number: int
    began: float


def freeze(
    sweep: Path,
    found: FoundSearch,
    entry: Entry,
    params: Mapping[str, Any],
    wait: Callable[[float], None],
) -> None:
    """Write the run directory of a new trial and put it into sweep.json.

    A run that has finished, or was begun by another command, is kept, and goes on. `wait` sleeps
    for some seconds, or raises to give up.
    """
    run, config = entry.run, entry.config
    trust.check(run.path, executed(config))
    values = [f"{key}={value}" for key, value in params.items()]
    entry.overrides, entry.before = [*found.overrides, *values], run.read()
    entry.swept = [*map(secrets.mask, values)]
    entry.mark(Status.ENDED, "trial")
    finished = entry.before.state == "finished"
    if not finished or config.launch.rerun == "all":
        if finished or may_start_again(run, config.train, config.checkpoint):
            run.archive()
            entry.before = run.read()
        parent = {"uid": found.uid, "name": f"search {found.study} {' '.join(params)}"}
        run.freeze(
            dump(config),
            state=entry.before.state or "created",
            submission=None,
            code=found.code,
            provenance=str(sweep / "provenance"),
            overrides=[*map(secrets.reference, entry.overrides)],
            config_dir=found.config_dir,
            **entry.place_in(parent),
        )
        stop_request.StopRequest.drop(run.path)
    with file_lock(sweep / "list", lambda: wait(_NAP_S)):
        path = sweep / "sweep.json"
        listed = read(list[dict[str, Any]], path)
        if all(each["run"] != str(run.path) for each in listed):
            write_atomically(path, written([*listed, entry.listed(secrets.known())]))


def take(run: RunDir, worker: WorkerFile) -> None:
    """Let the run have the job of the worker that trains it from now on."""
    record = run.read()
    if record.state == "finished":
        return
    if worker.script:
        # The restarts of a run count from its first submission on.
        since = record.submitted or time.time()
        place = {"script": worker.script, "task": worker.task, "user": me(), "time": since}
        run.update(submission=place)


def outcome(piece: TrialPiece, found: FoundSearch) -> tuple[int, float, bool] | None:
    """Return the rung at the end of a piece, the metric there, and whether the run has finished.

    None: it is to be trained, or to be gone on with. A trial that is not to be trained any more
    raises Pruned or a LaunchError.
    """
    run = RunDir(piece.run)
    record = run.read()
    attempt, reached = record.attempt, record.reached or 0
    finished = record.state == "finished"
    if finished or (record.state == "paused" and piece.until and reached >= piece.until):
        if (value := (record.result or {}).get(found.metric)) is None:
            raise LaunchError(f"no evaluation gives {found.metric}")
        # A run may have ended before the rung, as by train.max_epochs: it counts at the last one,
        # whose step may not be known before.
        rung = found.rungs[-1] if finished else piece.until
        return rung or reached, float(value), finished
    if request := stop_request.read(run.path, piece.began):
        raise Pruned(f"cancelled by {request.by}")
    # The batch script decides on it a moment later, or nobody does.
    decided = attempt.verdict or attempt.cause not in {each.name for each in DECIDED_LATER}
    if record.state == "failed" and decided and (attempt.ended or 0.0) >= piece.began:
        kind = Pruned if attempt.cause == NON_FINITE.name else LaunchError
        raise kind(one_line(attempt.error))
    if (record.state == "running" or not decided) and not run.is_locked():
        end = End(RANK_KILLED, "the worker that trained it was killed", step=attempt.step)
        last = run.last_checkpoint()
        verdict = decide(record, end, Room(), last)
        run.end_attempt(**verdict.record(last))
        if not verdict.goes_on:
            raise LaunchError(verdict.reason)
    return None
