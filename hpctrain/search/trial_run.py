"""The run directory of a trial: frozen by the worker that asked for it, taken over by others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain import secrets
from hpctrain.causes import NON_FINITE, RANK_KILLED, one_line
from hpctrain.config.frozen import load
from hpctrain.config.schema import Config
from hpctrain.disk import write_atomically
from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.launch.entry import Entry, Status
from hpctrain.lock import file_lock
from hpctrain.record import read, written
from hpctrain.restarts import policy
from hpctrain.runs import trust
from hpctrain.runs.freeze import may_start_again
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.search.trials import Found
from hpctrain.search.worker_arrays import WorkerFile
from hpctrain.slurm.queue import me

_LOOK_S = 1.0


class Pruned(HpctrainError):
    """A trial is not trained any more, although nothing has failed."""


def freeze(
    sweep: Path, found: Found, config: Config, run: RunDir, params: Mapping[str, Any]
) -> None:
    """Write the run directory of a new trial and put it into sweep.json.

    A run that has finished, or was begun by another command, is kept, and goes on.
    """
    values = [f"{key}={value}" for key, value in params.items()]
    trust.check(run.path, config)
    while run.is_locked():  # another command trains it
        time.sleep(_LOOK_S)
    entry = Entry([*found.overrides, *values], config, run, before=run.read())
    entry.swept = [*map(secrets.mask, values)]
    entry.mark(Status.ENDED, "trial")
    finished = entry.before.state == "finished"
    if not finished or config.launch.rerun == "all":
        if finished or may_start_again(config, run):
            run.archive()
            entry.before = run.read()
        parent = {"uid": found.uid, "name": f"search {found.study} {' '.join(params)}"}
        run.freeze(
            config,
            state=entry.before.state or "created",
            submission=None,
            code=found.code,
            provenance=str(sweep / "provenance"),
            overrides=[*map(secrets.reference, entry.overrides)],
            **entry.place_in(parent),
        )
        stop_request.clear(run.path)
    with file_lock(sweep / "list", lambda: time.sleep(0.05)):
        path = sweep / "sweep.json"
        listed = read(list[dict[str, Any]], path)
        if all(each["run"] != str(run.path) for each in listed):
            write_atomically(path, written([*listed, entry.listed(secrets.known())]))


def take(run: RunDir, worker: WorkerFile, found: Found) -> None:
    """Let the run have the nodes and the job of the worker that trains it from now on."""
    record = run.read()
    if record.state == "finished":
        return
    if len({*found.widths}) > 1:
        config = load(run.config_file)
        if config.launch.nodes != worker.width:
            run.freeze(replace(config, launch=replace(config.launch, nodes=worker.width)))
    if worker.script:
        # The restarts of a run count from its first submission on.
        since = record.submitted or time.time()
        place = {"script": worker.script, "task": worker.task, "user": me(), "time": since}
        run.update(submission=place)


def outcome(run: RunDir, until: int | None, metric: str, began: float) -> float | None:
    """Return the metric of the piece that ends at the step `until`; None: it is to be trained.

    A trial, which began at a time, that is not to be trained raises Pruned or a LaunchError.
    """
    record = run.read()
    attempt, reached = record.attempt, record.reached or 0
    if record.state == "finished" or (record.state == "paused" and until and reached >= until):
        if (value := (record.result or {}).get(metric)) is None:
            raise LaunchError(f"no evaluation gives {metric}")
        return float(value)
    if request := stop_request.read(run.path, began):
        raise Pruned(f"cancelled by {request.by}")
    # The batch script judges it a moment later, or nobody does.
    judged = attempt.verdict or attempt.cause not in {each.name for each in policy.JUDGED_LATER}
    if record.state == "failed" and judged and (attempt.ended or 0.0) >= began:
        kind = Pruned if attempt.cause == NON_FINITE.name else LaunchError
        raise kind(one_line(attempt.error))
    if (record.state == "running" or not judged) and not run.is_locked():
        end = policy.End(RANK_KILLED, "the worker that trained it was killed", step=attempt.step)
        last = run.last_checkpoint()
        answer = policy.answer(record, end, policy.Room(), last)
        run.end_attempt(**answer.record(last))
        if not answer.goes_on:
            raise LaunchError(answer.reason)
    return None
