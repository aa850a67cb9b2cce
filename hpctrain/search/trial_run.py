"""The run directory of a trial: frozen by the worker that asked for it, taken over by others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain import secrets
from hpctrain.causes import RANK_KILLED, one_line
from hpctrain.config.frozen import load
from hpctrain.config.schema import Config
from hpctrain.disk import write_atomically
from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.lock import file_lock
from hpctrain.record import read, written
from hpctrain.restarts import policy
from hpctrain.runs import missing_checkpoints, sweep_overrides, trust
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import stop_request
from hpctrain.search.search_file import SearchFile
from hpctrain.search.trials import Found
from hpctrain.search.worker_arrays import WorkerFile
from hpctrain.slurm.queue import me

_LOOK_S = 1.0


class Stopped(HpctrainError):
    """Somebody has cancelled the run of a trial."""


def freeze(
    sweep: Path,
    file: SearchFile,
    found: Found,
    config: Config,
    run: RunDir,
    params: Mapping[str, Any],
) -> None:
    """Write the run directory of a new trial and put it into sweep.json.

    A run that has finished, or was begun by another command, is kept, and goes on.
    """
    overrides = [*file.overrides, *(f"{key}={value}" for key, value in params.items())]
    (swept,) = sweep_overrides.values_of([overrides], [*params])
    before = run.read()
    trust.check(run.path, config)
    while run.is_locked():  # another command trains it
        time.sleep(_LOOK_S)
    if before.state != "finished" or config.launch.rerun == "all":
        if before.state == "finished" or missing_checkpoints.may_start_again(config, run):
            run.archive()
        before = run.read()
        parent = {"uid": found.uid, "name": f"search {file.study} {' '.join(params)}"}
        place: dict[str, Any] = {} if before.sweep else {"sweep": parent, "swept": swept}
        run.freeze(
            config,
            state=before.state or "created",
            submission=None,
            code=file.code,
            provenance=str(sweep / "provenance"),
            overrides=[secrets.reference(text) for text in overrides],
            **place,
        )
        stop_request.clear(run.path)
    with file_lock(sweep / "list", lambda: time.sleep(0.05)):
        _list(sweep, run, swept, overrides)


def _list(sweep: Path, run: RunDir, swept: list[str], overrides: list[str]) -> None:
    path = sweep / "sweep.json"
    listed = [*read(tuple[Any, ...], path)] if path.exists() else []
    if any(each.get("run") == str(run.path) for each in listed):
        return
    known = secrets.known()
    listed.append(
        {
            "run": str(run.path),
            "name": sweep_overrides.titled(run.name, swept),
            "swept": swept,
            "job": "",
            "state": "trial",
            "overrides": [secrets.reference(text, values=known) for text in overrides],
        }
    )
    write_atomically(path, written(listed))


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


def outcome(
    run: RunDir, until: int | None, metric: str, began: float
) -> float | HpctrainError | None:
    """Return what is known of the piece that ends at the step `until`; None: it is to be trained.

    It is the value of the metric, or why the trial, which began at a time, is not trained.
    """
    record = run.read()
    step = (record.result or {}).get("step", 0)
    if record.state == "finished" or (record.state == "paused" and until and step >= until):
        value = (record.result or {}).get(metric)
        return LaunchError(f"{metric} is {value}") if value is None else float(value)
    if request := stop_request.read(run.path, began):
        return Stopped(f"cancelled by {request.by}")
    attempt = record.attempt
    if record.state == "failed" and (attempt.ended or 0.0) >= began:
        return LaunchError(one_line(attempt.error))
    if record.state == "running" and not run.is_locked():
        end = policy.End(RANK_KILLED, "the worker that trained it was killed", step=attempt.step)
        last = run.last_checkpoint()
        answer = policy.answer(record, end, policy.Room(), last)
        run.end_attempt(**answer.record(last))
        if not answer.goes_on:
            return LaunchError(answer.reason)
    return None
