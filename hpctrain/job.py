"""Where all doors end: train a frozen run directory on the ranks that are here.

python -m hpctrain …            ┐
torchrun -m hpctrain …          ├── freeze ──┐
python -m hpctrain -m …         │            ├── train(run, config, ranks)
sbatch slurm/train.sbatch …     ┘            ┘
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import ExitStack
from typing import Any

from hpctrain import __version__
from hpctrain.build import build, build_tracker
from hpctrain.config import Config
from hpctrain.distributed.group import process_group
from hpctrain.distributed.slurm import RankInfo
from hpctrain.launch.requeue import requeue
from hpctrain.rundir import RunDir
from hpctrain.tracking.tracker import NullTracker, Tracker
from hpctrain.train.stop import Stop
from hpctrain.train.trainer import Outcome

log = logging.getLogger(__name__)
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def train(config: Config, run: RunDir, ranks: RankInfo) -> int:
    """Train the run from its last checkpoint.

    Args:
        config: the frozen config.
        run: its directory; rank 0 holds it for the time of the training.
        ranks: this process's place.

    Returns:
        The exit code: 0, or 130 / 143 when it was asked to stop and has saved.

    Raises:
        HpctrainError: what the user can mend; recorded in the run directory as well.
    """
    record = _Record(run) if ranks.is_main else _NoRecord()
    with ExitStack() as stack:
        tracker: Tracker = NullTracker()
        if ranks.is_main:
            stack.enter_context(run.lock())
        # From here on a signal is a request to stop, not a sudden death.
        stop = stack.enter_context(Stop())
        record.begin(ranks)
        try:
            tracker = build_tracker(config, run, ranks)
            tracker.start(_params(config), _tags(ranks))
            with process_group(ranks, config.parallel, config.launch.cpus_per_task) as device:
                if ranks.is_main:
                    log.info("%s on %s, %s", run.path, device, ranks)
                outcome = build(config, run, ranks, device, tracker, stop).fit()
        except BaseException as error:
            record.end("failed", error=f"{type(error).__name__}: {error}")
            tracker.finish("FAILED", reason=f"{type(error).__name__}: {error}")
            raise
        if outcome.finished:
            record.end("finished", result={"step": outcome.step} | outcome.metrics)
            tracker.finish("FINISHED")
            return 0
        return _interrupted(outcome, stop, ranks, record, tracker)


def _interrupted(
    outcome: Outcome, stop: Stop, ranks: RankInfo, record: _Record | _NoRecord, tracker: Tracker
) -> int:
    """Saved on request: come back under Slurm, where the request was not the user's."""
    record.end("interrupted", reason=stop.reason, step=outcome.step)
    tracker.finish("KILLED", reason=f"stopped by {stop.reason} at step {outcome.step}, saved")
    if ranks.is_main:
        log.info("stopped by %s at step %d, saved: it resumes there", stop.reason, outcome.step)
    if stop.reason == "SIGINT":
        return EXIT_INTERRUPTED
    if ranks.is_main and ranks.launcher == "slurm":
        # A run that makes no step between two restarts would come back for ever.
        if outcome.step == outcome.first_step and ranks.restart_count > 0:
            log.error("no step since the last restart: not requeued")
        else:
            requeue(ranks.job_id)
    return EXIT_TERMINATED


def _params(config: Config) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(config)


def _tags(ranks: RankInfo) -> dict[str, str]:
    return {
        "hpctrain.version": __version__,
        "hpctrain.launcher": ranks.launcher,
        "hpctrain.job_id": ranks.job_id,
        "hpctrain.hosts": ",".join(ranks.hosts),
        "hpctrain.world_size": str(ranks.world_size),
        "hpctrain.command": " ".join(sys.argv),
    }


class _Record:
    """Rank 0's entries in run.json."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def begin(self, ranks: RankInfo) -> None:
        self._run.begin_attempt(
            host=socket.gethostname(),
            pid=os.getpid(),
            launcher=ranks.launcher,
            world_size=ranks.world_size,
            hosts=list(ranks.hosts),
            job_id=ranks.job_id,
            restart_count=ranks.restart_count,
        )

    def end(self, state: str, **facts: Any) -> None:
        self._run.end_attempt(state, **facts)


class _NoRecord:
    """The other ranks write nothing."""

    def begin(self, ranks: RankInfo) -> None:
        pass

    def end(self, state: str, **facts: Any) -> None:
        pass
