"""Train a frozen run directory on the ranks of this job: every way to start ends here.

python -m hpctrain …            ┐
torchrun -m hpctrain …          ├── freeze ──┐
python -m hpctrain -m …         │            ├── train(config, run, ranks)
sbatch slurm/train.sbatch …     ┘            ┘
"""

from __future__ import annotations

import faulthandler
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch

from hpctrain.base import offered
from hpctrain.base.errors import ConfigError, LateRankError, MisfitError
from hpctrain.base.forks import at_end_of_parent
from hpctrain.base.processes import marks
from hpctrain.cluster.ranks import epochs
from hpctrain.cluster.ranks.ranks import RankInfo
from hpctrain.cluster.slurm.requeue import LeadTime, limits_s
from hpctrain.config.sections import RunSections
from hpctrain.data.workers.pool import stacks
from hpctrain.engine.building.instantiate import instantiate
from hpctrain.engine.distributed import long_work
from hpctrain.engine.distributed.devices import job_gpus
from hpctrain.engine.distributed.group import lease, process_group
from hpctrain.engine.faults.collectives import where
from hpctrain.engine.faults.health import RolledBack
from hpctrain.engine.faults.observed import timed_out
from hpctrain.engine.faults.stop import Stop
from hpctrain.engine.job.attempt import Attempt
from hpctrain.engine.parallel.precision import default_dtype
from hpctrain.engine.parts.clocks import Account, process_began
from hpctrain.engine.session import Session
from hpctrain.engine.steps.place import Place
from hpctrain.engine.supervised.deterministic import deterministic
from hpctrain.runs.code import trained_code
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.failure import recorded
from hpctrain.runs.state.stop_request import StopRequest
from hpctrain.runs.terminal_log import kept
from hpctrain.tracking.journal import journal_path, last_record
from hpctrain.tracking.tracker import Tracker

log = logging.getLogger(__name__)
_EXIT_INTERRUPTED = 130
_EXIT_TERMINATED = 143


def train(config: RunSections, run: RunDir, ranks: RankInfo, began: float | None = None) -> int:
    """Train the run from its last checkpoint; rank 0 holds the lock of its directory.

    The exit code is 0, or 130 or 143 when the run was stopped on request and saved. A node that has
    failed the checks of `launch.preflight` is a NodeError. Errors are recorded in the run
    directory. The attempt has `began` with this process, or at a time of `time.monotonic`.
    """
    with _opened(config, run, ranks, began) as place:
        _go_through(instantiate("loop", {**config.loop, "_partial_": True}), place)
    return _exit_code(place)


@contextmanager
def session_of(
    config: RunSections, run: RunDir, ranks: RankInfo, began: float | None = None
) -> Iterator[Session]:
    """Be one rank of a run whose loop is the context; else as `train`.

    Raises SystemExit with the exit code of `train` at its end, if the run was stopped.
    """
    with _opened(config, run, ranks, began) as place, Session(place).open() as session:
        yield session
    if code := _exit_code(place):
        raise SystemExit(code)


def _go_through(loop: Callable[[Session], None], place: Place) -> None:
    """Go through a loop; after a rollback everything is built again, as in another attempt.

    The models are gone when this returns, so they end before the process group: a
    DistributedDataParallel that outlives its group is the last to hold it. It then ends gloo's
    threads while it holds Python's lock, and such a thread may wait for this lock for ever.
    """
    while place.outcome is None:
        with suppress(RolledBack), Session(place).open() as session:
            loop(session)
        del session  # its successor needs the memory
        place.began_from = lambda step, damaged: None  # of a rollback the journal tells


@contextmanager
def _opened(
    config: RunSections, run: RunDir, ranks: RankInfo, began: float | None
) -> Iterator[Place]:
    """Be one rank of a run: in its process group, with its stop requests, record and sensors."""
    given = config.of_loop
    with suppress(OSError, AttributeError):  # a notebook's stderr may be no file
        faulthandler.enable()  # says where the process died when a mapped shard was truncated
    if ranks.launcher in ("torchrun", "submitit-local"):
        # Else its ranks would outlive a launcher that is killed, and hold the run.
        at_end_of_parent(signal.SIGTERM)
    # A process that was started by hand is looked at only on demand.
    asked = ranks.launcher == "slurm" or config.job.launch.preflight == "full"
    checks = offered.preflight if asked and not ranks.piece else None
    if checks is not None:
        checks.wait_for_gpus(given.parallel.device, config.job.launch, run, ranks)
    # From here on a signal is a stop request and no longer ends the process.
    with (
        Stop(limits_s() if ranks.launcher == "slurm" else {}) as stop,
        Attempt(config, run, ranks) if ranks.is_main else nullcontext() as attempt,
        process_group(ranks, given.parallel, config.job.launch, run.path) as device,
        # Before the process group ends: the end of this rank lets the others fail.
        recorded(run.path, ranks.attempt_key, ranks.rank),
        # The log of rank 0 has begun earlier; the folder exists, because rank 0 is here.
        nullcontext() if ranks.is_main else kept(run.logs, ranks),
    ):
        stop.tell = partial(_tell_late, run, ranks)
        if attempt:
            count = torch.get_num_threads()
            log.info("%s on %s (torch threads: %d), %s", run.path, device, count, ranks)
            if ranks.launcher == "slurm":
                stop.due_s = LeadTime(config.job.launch, run.path, ranks.job_id).due_s
            # Rank 0 holds the lock of the run.
            stop.watch(StopRequest.path(run.path), partial(_end_if_over, run, ranks))
        if checks is not None:
            sections = config.job, given.parallel, config.network, given.data
            checks.check_nodes(*sections, run, ranks, device)
        with offered.monitored(config.monitor, run.path, ranks, job_gpus(device)):
            since = process_began() if began is None else began
            account = Account(since, ranks.world_size, _trained_s(run, ranks))
            tracker = attempt.tracker if attempt else Tracker()
            place = Place(given, run, ranks, device, tracker, stop, account)
            if attempt:
                place.began_from = attempt.began_from
            marks.open_page().where = partial(where, ranks.world_size, stacks)
            store = long_work.store() if ranks.world_size > 1 else None
            here_since = time.time()
            try:
                with (
                    lease(store, ranks.rank, ranks.master_port) if store else nullcontext(),
                    deterministic(device) if given.train.deterministic else nullcontext(),
                    default_dtype(given.precision),
                ):
                    yield place
            except (RuntimeError, MisfitError) as error:
                if explained := _explained(error, place, here_since):
                    raise explained from error
                raise
        stop.met()
        # This happens inside the process group, whose teardown waits for rank 0: Slurm and
        # torchrun kill all ranks as soon as one has exited with a code other than 0.
        assert place.outcome is not None
        if attempt:
            attempt.ended(place.outcome, stop.reason)


def _end_if_over(run: RunDir, ranks: RankInfo) -> None:
    for folder in ranks.folders(run.path):
        epochs.end_if_over(folder, ranks.attempt_key)


def _tell_late(run: RunDir, ranks: RankInfo, reason: str) -> None:
    log.error("%s: this rank exits, so that the job can go on", reason)
    with suppress(LateRankError), recorded(run.path, ranks.attempt_key, ranks.rank):
        raise LateRankError(f"rank {ranks.rank} ({ranks.host(ranks.rank)}): {reason}")


def _trained_s(run: RunDir, ranks: RankInfo) -> float:
    """Return the seconds of the attempts before times their devices, which rank 0 knows."""
    if not ranks.is_main or len(run.read().attempts) < 2:
        return 0.0
    before = last_record(journal_path(run.path), "device_s")
    return before["device_s"] if before else 0.0


def _exit_code(place: Place) -> int:
    assert place.outcome is not None
    if place.outcome.finished or place.outcome.paused:
        return 0
    return _EXIT_INTERRUPTED if place.stop.reason == "SIGINT" else _EXIT_TERMINATED


def _explained(error: Exception, place: Place, since: float) -> Exception | None:
    """Return what says more of an error that the code, the config or another rank has caused."""
    run, ranks = place.run, place.ranks
    if isinstance(error, MisfitError):
        code = trained_code.changes(run)
        changed = f". The code has changed: {code}" if code else ""
        return MisfitError(
            f"{error}{changed}. Put the model back as it was; or {trained_code.CHOICE}"
        )
    if "does not have a deterministic implementation" in str(error):
        return ConfigError(f"train.deterministic=true: {error}")
    return timed_out(error, run.path, ranks, place.config.parallel.timeout_s, since)
