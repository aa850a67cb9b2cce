"""`python -m hpctrain work FOLDER`: the ranks of a worker train the trials of a search in turn.

    rank 0       ── hpctrain.search.workers: the next piece ── FOLDER/pieces ──┐
    other ranks  ── wait for the next line of this file ───────────────────────┤
    all ranks    ◄── train RUN up to its rung (hpctrain.engine.job.here) ◄────────────┘
    rank 0       ── report, or failed, or left: another worker goes on with it

Between two trials there is no queue and no import. `forget` drops what the one has left in the
process, so that the next one is trained as by a process of its own.

A worker of one rank goes on in the same process after a trial has failed. The process group of
several ranks cannot be used again after an error: they end, and the batch script starts them again
(`hpctrain.engine.job.verdict`, and `of_worker` of `pieces`). For it, `hang.json` in the folder is
that of the run in training.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import ConfigError, HpctrainError
from hpctrain.base.processes.causes import GPU_MEMORY
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.requeue import requeue_from_rank
from hpctrain.engine.faults import early_signals as signals
from hpctrain.engine.job.here import log_to_stderr, train_frozen
from hpctrain.engine.job.verdict import close_tracking, is_over, of_run
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state import failure, stop_request
from hpctrain.search import pieces

if TYPE_CHECKING:
    from hpctrain.search.trial_run import TrialPiece
    from hpctrain.search.workers import Worker

log = logging.getLogger(__name__)
_TERMINATED = 143  # the batch script starts the ranks again, or requeues the job
_FRESH_SEED = 67280421310721  # of torch in a new process (c10::detail::default_rng_seed_val)


def main(argv: list[str]) -> int:
    """Train one piece after another; return the exit code."""
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("work takes the folder of a worker: python -m hpctrain work FOLDER")
    folder = Path(os.path.realpath(argv[0]))
    log_to_stderr()
    ranks = replace(RankInfo.from_env(), worker=str(folder))
    if not ranks.is_main:
        return _follow(folder, ranks)
    from hpctrain.search.workers import Worker

    key = ranks.attempt_key
    try:
        code = _lead(Worker(folder, lambda: _stopped(folder)), folder, ranks)
    except BaseException:
        # The others wait for the next line, or in a collective operation of a training.
        if pieces.current(folder, key) is None:
            pieces.add(folder, key, code=1)
        raise
    pieces.add(folder, key, code=code)
    return code


def _follow(folder: Path, ranks: RankInfo) -> int:
    for line in pieces.follow(folder, ranks.attempt_key):
        if line.code is not None:
            return line.code
        if line.run:
            train_frozen(Path(line.run), line.until or None, ranks)
            ranks = replace(ranks, piece=ranks.piece + 1)
            forget()
    raise AssertionError


def _stopped(folder: Path) -> bool:
    return bool(signals.noted or stop_request.read(folder))


def _lead(worker: Worker, folder: Path, ranks: RankInfo) -> int:
    code = 0
    while not (code or _stopped(folder)):
        epochs.end_if_over(folder, ranks.attempt_key)
        with pieces.signs(folder):
            piece = worker.next()
        if piece is None:
            break
        code = _train(worker, piece, folder, ranks)
        ranks = replace(ranks, piece=ranks.piece + 1)
    if signals.noted and not code:
        code = _TERMINATED
        if ranks.launcher == "slurm" and not stop_request.read(folder):
            requeue_from_rank(ranks.job_id)
    return code


def _train(worker: Worker, piece: TrialPiece, folder: Path, ranks: RankInfo) -> int:
    """Train a piece with all ranks, and tell how it went; return 0 if the worker goes on."""
    run, key = RunDir.open(piece.run), ranks.attempt_key
    while True:
        epochs.begin(run.path, key)
        failure.Failure.path(run.path).unlink(missing_ok=True)  # it may have the key of these ranks
        hang = folder / "hang.json"
        hang.unlink(missing_ok=True)
        hang.symlink_to(run.path / "hang.json")
        pieces.add(folder, key, run=str(run.path), until=piece.until or 0)
        began = time.monotonic()
        code, again = 0, False
        try:
            code = train_frozen(run.path, piece.until, ranks)
        except Exception as error:
            again = not _has_failed(error, run, ranks)  # with smaller micro-batches
        can_go_on = forget()
        if not again:
            break
    log.info("%s: trained for %.1f s", run.name, time.monotonic() - began)
    if stop_request.read(folder):  # the worker was cancelled: the trial waits for another command
        stop_request.StopRequest.drop(run.path)
    why = run.read().attempt.error or "its training has ended without a result"
    worker.settle(piece, "" if code else why)
    pieces.add(folder, key)
    if not can_go_on:
        log.error("CUDA cannot be used any more in this process: the ranks are started again")
        return _TERMINATED
    # The run was cancelled, and not the job.
    return 0 if code and stop_request.read(run.path) else code


def _has_failed(error: Exception, run: RunDir, ranks: RankInfo) -> bool:
    """Return whether a trial has failed for good; what this process cannot go on from is raised."""
    if ranks.world_size > 1:
        raise error
    words = of_run(run, 1, ranks.attempt_key, inside=True)
    if is_over(words):
        close_tracking(run, 1)
    elif words != "restart" or run.read().attempt.cause != GPU_MEMORY.name:
        raise error
    log.error("%s: %s", run.name, error, exc_info=not isinstance(error, HpctrainError))
    return is_over(words)


def forget() -> bool:
    """Drop what a training has left in this process beside its settings of torch.

    Return whether CUDA can still be used: after some errors of a kernel no call succeeds.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()  # it compiles a function for so many shapes, and then no more
    if debug := sys.modules.get("torch.distributed.tensor.debug"):
        debug._clear_sharding_prop_cache()  # it knows the names of the process groups
    gc.collect()
    torch.manual_seed(_FRESH_SEED)
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    except RuntimeError:
        return False
    return True
